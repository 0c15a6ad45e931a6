"""Reward models between the Buffer and the learner, and before the start."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from learner.config import RunConfig
from learner.config.arrangement import ARRANGEMENTS
from learner.driver.identity import same_base
from learner.driver.roles import worker_spec
from learner.model.adapter_config import HEAD
from learner.model.trial import wrong_with
from rollout import ledger
from rollout.schema import parts_of, rewards_of
from tests.learner.driver.test_preflight import check, config, model
from tests.learner.loops import build, configure, finish, lines
from tests.learner.model.test_reference import theirs

__all__ = ["config", "model"]  # fixtures


async def test_scores_are_facts_before_anything_is_learned(tmp_path: Path) -> None:
    """The fake worker's reward is 1 for an odd number of tokens, the fake learner's score the number."""
    rewards = [{"use": "odd"}, {"use": "adapter:folders/helpful", "weight": 0.5}]
    run = build(tmp_path, configure(rewards=rewards), 2)
    await finish(run)
    means = []
    for path in ledger.steps(tmp_path / "rollouts"):
        rows = ledger.read(path)
        lengths = [len(ids) for ids in rows.column("completion_ids").to_pylist()]
        assert parts_of(rows) == [{"odd": length % 2, "helpful": length} for length in lengths]
        assert rewards_of(rows).tolist() == [length % 2 + 0.5 * length for length in lengths]
        means.append(sum(lengths) / len(lengths))
    learned = run.trainer._object.learned[-1]  # type: ignore[attr-defined]
    assert np.concatenate([rewards_of(group) for group in learned]).tolist() == rewards_of(rows).tolist()
    written = lines(tmp_path)
    assert [line["reward/helpful"] for line in written[1:]] == pytest.approx(means)
    assert all(line["time/score"] > 0 for line in written[1:])
    assert "eval/odd" in written[0]
    assert "eval/helpful" not in written[0]


def test_workers_are_not_asked_for_what_the_learner_scores() -> None:
    class Settled:
        kv_cache, arrangement, plan = 1, ARRANGEMENTS["auto"], None

    rewards = [{"use": "adapter:x/odd"}, {"use": "a.py:odd"}]
    spec = worker_spec(configure(rewards=rewards), 0, Settled())  # type: ignore[arg-type]
    assert [(reward.use, reward.name) for reward in spec.rewards] == [("a.py:odd", "odd_2")]


@pytest.fixture
def reward_model(model: Path, tmp_path: Path) -> Path:
    theirs(str(model)).save_pretrained(tmp_path / "helpful")
    return tmp_path / "helpful"


def _renamed(folder: Path) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "hub/Other-1B"}))


def _of_rank(rank: object) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        content = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": None}
        (folder / "adapter_config.json").write_text(json.dumps(content | {"r": rank}))

    return harm


def _cut(folder: Path) -> None:
    _of_rank(8)(folder)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _with_head(*shape: int) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        weights = load_file(folder / "adapter_model.safetensors")
        save_file(weights | {HEAD: torch.zeros(shape)}, folder / "adapter_model.safetensors")

    return harm


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda _: None, ""),
        (_renamed, "rewards: helpful: base_model_name_or_path of .* must be model.path, .*/tiny, got hub/Other-1B: on"),
        (
            _with_head(2, 64),
            "rewards: helpful: .* must be a head of one output, got 2 outputs; train it with num_labels=1",
        ),
    ],
)
def test_what_its_files_say_is_checked_before_the_start(
    harm: Any, message: str, config: dict[str, Any], reward_model: Path, no_trials: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    harm(reward_model)
    rewards = [*config["rewards"], {"use": "adapter:helpful"}]
    code, out, err = check(config | {"rewards": rewards}, "--dry-run", "--verbose", capsys=capsys)
    assert code == (2 if message else 0)
    found = [line for line in err.splitlines() if line.startswith(("error: ", "config: "))]
    assert [bool(re.search(message, line)) for line in found] == [True] * bool(message)
    assert message or f"use: adapter:{reward_model}" in out


def test_what_a_value_starts_from_is_checked_likewise(
    config: dict[str, Any], reward_model: Path, no_trials: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ppo = config | {"learner": {"algorithm": "ppo", "value": {"start": str(reward_model)}}}
    assert check(ppo, "--dry-run", capsys=capsys)[0] == 0
    _with_head(1, 7)(reward_model)
    (line,) = wrong_with(RunConfig.model_validate(ppo))
    assert line.startswith("learner.value.start: 1 weights of ")
    for harm, message in (
        (_renamed, "base_model_name_or_path of .*, got hub/Other-1B"),
        (_of_rank("x"), "r of .* must be a whole number from 1, got 'x'"),
        (_cut, ".*adapter_model.safetensors must have .* bytes by its header"),
    ):
        harm(reward_model)
        code, _, err = check(ppo, "--dry-run", capsys=capsys)
        assert code == 2
        assert re.search(f"^error: learner.value.start: {message}", err, re.M)


def test_the_base_of_a_reward_model_is_known_by_its_weights(model: Path, tmp_path: Path) -> None:
    moved = tmp_path / "models--hub--Some-1B" / "snapshots" / "0123"
    shutil.copytree(model, moved)
    other = tmp_path / "other" / model.name
    other.mkdir(parents=True)
    save_file({"weight": torch.zeros(1)}, other / "model.safetensors")
    assert same_base(str(model), str(moved))
    assert not same_base(str(model), str(other))
    assert same_base("hub/Some-1B", str(moved))
    assert not same_base("hub/0123", str(moved))


def test_what_does_not_fit_the_model_is_found_without_its_weights(config: dict[str, Any], reward_model: Path) -> None:
    rewards = [*config["rewards"], {"use": f"adapter:{reward_model}"}]
    assert wrong_with(RunConfig.model_validate(config | {"rewards": rewards})) == []
    _with_head(1, 7)(reward_model)
    (line,) = wrong_with(RunConfig.model_validate(config | {"rewards": rewards}))
    assert re.search(
        r"^rewards: helpful: 1 weights of .* another shape .*score.weight: must be \[1, \d+\], got \[1, 7\]", line
    )


def test_settings_of_a_function_are_refused() -> None:
    with pytest.raises(ValueError, match="use: adapter:<folder> does not go with args, timeout_s: no function"):
        RunConfig.model_validate(
            {
                "model": {"path": "m"},
                "data": {"path": "d"},
                "rewards": [{"use": "adapter:x", "args": {"a": 1}, "timeout_s": 3}],
            }
        )
