"""gleaner replay: the recorded steps again, from the beginning and from a checkpoint; what differs is found at its
step. That a whole run of Ray and vLLM comes out the same is tests/flow/test_run.py's. Where a metric broke: found at
its step, and not where there is only noise or learning.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from cluster.errors import WrongInput
from learner.driver import record as mismatch_files
from learner.tools.cli import main
from learner.tools.replay import command
from learner.tools.replay.command import Compared, change_of, worse
from learner.tools.replay.recorded import read_recorded
from learner.tools.replay.what_if import changes_of, check_possible
from learner.tools.report.page import blocks_of, unpacked
from learner.trainer import float32_products
from rollout import ledger
from rollout.env.config import EnvConfig
from rollout.schema import parts_of, rewards_of
from tests.learner.recorded_run import config_of, record

STEPS = 4


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What holds for the whole process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(float32_products, "FASTER", 1e9)  # no trial, which noise may decide
    library: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = library.fp32_precision
    yield
    library.fp32_precision = before


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_path: str) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    asyncio.run(record(folder, config_of(folder, tiny_path), STEPS, halved_at=4))
    return folder


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def replayed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    code = main(["replay", *map(str, words), "--json"])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if told["same"] else 1)
    return told


def change(run: Path, step: int, column: str, values: list[Any]) -> None:
    """Other values in one column of a step's rollouts."""
    file = run / "rollouts" / f"step-{step:06d}.parquet"
    rows = ledger.read(file)
    place = rows.schema.get_field_index(column)
    pq.write_table(rows.set_column(place, rows.field(place), pa.array(values, rows.field(place).type)), file)


def test_the_same_settings_give_the_same_policies(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for start in (0, 2):  # from a checkpoint too, and over a change of the token budget
        assert main(["replay", str(recorded), "--from", str(start)]) == 0
        out = capsys.readouterr().out
        assert out.count("the same digest") == 1 + STEPS - start  # with the one that it begins with
        assert "every policy has the digest that the run recorded" in out


PPO = {"algorithm": "ppo", "updates_per_batch": 2, "loss": {"ratio": "clip", "bounds": {"epsilon": (0.2, 0.2)}}}


@pytest.mark.parametrize("learner", [PPO, {"mode": "full"}], ids=["a value and several updates", "all weights"])
def test_so_they_do_with(tmp_path: Path, tiny_path: str, learner: dict[str, Any]) -> None:
    folder = tmp_path / "run"
    asyncio.run(record(folder, config_of(folder, tiny_path, **learner), 3, halved_at=9))
    for start in (0, 2):
        assert main(["replay", str(folder), "--from", str(start)]) == 0


def test_a_changed_ledger_is_found_at_its_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(run, 3, "reward", [0.0, 0.0, 1.0, 1.0, 0.5, 0.0, 1.0, 1.0])
    told = replayed(capsys, run)
    assert not told["same"]
    found = told["first_difference"]
    assert found["step"] == 3
    assert found["digests"][0] != found["digests"][1]
    assert {"reward/mean", "loss/grad_norm"} <= found["metrics"].keys()
    assert replayed(capsys, run, "--to", "2")["same"]
    assert main(["replay", str(run)]) == 1
    assert "step 3 is the first that differs" in capsys.readouterr().out


def test_a_metric_is_shown_under_its_name(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.show_difference(read_recorded(recorded), Compared(1, (None, "now"), {"env/a[/b]": (None, 1.0)}))
    assert "env/a[/b]" in capsys.readouterr().out


def test_a_run_that_recorded_no_digests_is_compared_by_its_metrics(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "policies.jsonl").unlink()
    assert main(["replay", str(run), "--to", "3"]) == 0
    assert "0 of 3 steps have a digest" in capsys.readouterr().out


def test_what_is_written_meanwhile_is_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("metrics.jsonl", "policies.jsonl"):
        text = (run / name).read_text()
        (run / name).write_text(text[: text.rstrip("\n").rfind("\n") + 20])  # the line of step 4 is half there
    assert replayed(capsys, run)["to"] == 3


def lines_of(run: Path) -> dict[int, dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines}


def test_another_rate_differs_from_the_policy_of_the_first_step_on(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "other"
    assert main(["replay", str(recorded), "learner.learning_rate=5e-2", "--output", str(place)]) == 0
    out = capsys.readouterr().out
    then, now = lines_of(recorded), lines_of(place)
    assert then.keys() == now.keys()
    assert now[1]["loss/grad_norm"] == then[1]["loss/grad_norm"]  # the policy is still that of the run
    assert all(now[step]["loss/grad_norm"] != then[step]["loss/grad_norm"] for step in (2, 3, 4))
    assert now[4]["policy/mismatch_k3"] > 1e-2  # from a sampler that never was this policy
    assert "from step 1 on the policy was more than 0.01 nats a token" in out
    for step in (1, 4):
        name = f"step-{step:06d}.parquet"
        assert ledger.read(place / "rollouts" / name).equals(ledger.read(recorded / "rollouts" / name))
        groups = mismatch_files.read_mismatch(place / "mismatch" / name).values()
        of_tokens = [value for rows in groups for row in rows if row is not None for value in row]
        assert max(map(abs, of_tokens)) == pytest.approx(now[step]["policy/mismatch_max"], rel=1e-3)
    told = json.loads((place / "replay.json").read_text())
    assert told["changed"] == {"learner.learning_rate": {"run": 1e-3, "replay": 5e-2}}
    _, blocks = blocks_of(place, recorded, 2**20)
    assert "step-4" in blocks
    assert [key for key, *_ in unpacked(blocks["head"])["differences"]] == ["learner.learning_rate"]


def test_other_rewards_are_those_of_the_functions(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def letters(completions, **_):\n    return [len(text) for text in completions]\n"
    )
    place = tmp_path / "other"
    words = [f"rewards=[{{use: {tmp_path}/mine.py:letters, weight: 0.5}}]", "--to", "2", "--output", str(place)]
    assert main(["replay", str(recorded), *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(place)
    rows = ledger.read(place / "rollouts" / "step-000002.parquet")
    lengths = [len(ids) for ids in rows.column("completion_ids").to_pylist()]
    assert rewards_of(rows).tolist() == [length / 2 for length in lengths]
    assert parts_of(rows) == [{"letters": float(length)} for length in lengths]
    assert lines_of(place)[2]["reward/letters"] == pytest.approx(sum(lengths) / len(lengths))
    assert lines_of(place)[1]["loss/grad_norm"] != lines_of(recorded)[1]["loss/grad_norm"]


def test_a_watch_changes_no_bit_of_what_is_learned(recorded: Path, tmp_path: Path) -> None:
    """One that fails on some completions, and would change every reward if it counted."""
    (tmp_path / "mine.py").write_text(
        "def letters(completions, **_):\n    return [len(text) for text in completions]\n"
        "def strict(completions, **_):\n    return [float('nan') if len(text) % 2 else -9.0 for text in completions]\n"
    )
    letters, strict = (f"use: {tmp_path}/mine.py:{name}" for name in ("letters", "strict"))
    learned = {}
    for name, rewards in (("alone", f"{{{letters}}}"), ("watched", f"{{{strict}, watch: true}}, {{{letters}}}")):
        place = tmp_path / name
        assert main(["replay", str(recorded), f"rewards=[{rewards}]", "--output", str(place), "--json"]) == 0
        learned[name] = (place / "adapter" / "adapter_model.safetensors").read_bytes()
    assert learned["watched"] == learned["alone"]
    rows = [ledger.read(tmp_path / name / "rollouts" / "step-000004.parquet") for name in learned]
    assert [row.column("reward_status").to_pylist() for row in rows] == [["ok"] * len(rows[0])] * 2
    assert {name for row in parts_of(rows[1]) for name in row} == {"strict", "letters"}


def test_rewards_that_are_named_are_asked_again(recorded: Path, tmp_path: Path) -> None:
    """Their file may have changed since; the rewards that the steps were recorded with are no function's."""
    place = tmp_path / "again"
    assert main(["replay", str(recorded), "rewards.0.use=length", "--to", "1", "--output", str(place), "--json"]) == 0
    rows = [ledger.read(one / "rollouts" / "step-000001.parquet") for one in (place, recorded)]
    assert rewards_of(rows[0]).tolist() != rewards_of(rows[1]).tolist()
    assert json.loads((place / "replay.json").read_text())["changed"] == {
        "rewards": {"run": ["length"], "replay": ["length"]}
    }


def test_what_is_broken_off_says_what_it_leaves(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "def few(completions, at, **_):\n"
        "    file = __import__('pathlib').Path(at)\n"
        "    file.write_text(file.read_text() + '.')\n"
        "    return [1.0] * len(completions) if len(file.read_text()) <= int(file.stem) else None\n"
    )
    for calls, left in ((1, []), (3, [1])):  # the first call is the trial, and each step has two groups
        place, counted = tmp_path / "other", tmp_path / f"{calls}.txt"
        counted.write_text("")
        rewards = f"rewards=[{{use: {tmp_path}/mine.py:few, args: {{at: {counted}}}}}]"
        assert main(["replay", str(recorded), rewards, "--output", str(place)]) == 1
        err = capsys.readouterr().err
        assert (f"unfinished {place} has 1 steps and not what was learned" in err) == bool(left)
        assert sorted(lines_of(place) if place.exists() else []) == left


def test_the_adapter_of_any_step_can_be_had(recorded: Path, tmp_path: Path) -> None:
    assert main(["replay", str(recorded), "--to", "2", "--output", str(tmp_path / "half"), "--json"]) == 0
    saved = recorded / "checkpoints" / "step-000002" / "trainer" / "adapter_model.safetensors"
    assert (tmp_path / "half" / "adapter" / "adapter_model.safetensors").read_bytes() == saved.read_bytes()


def test_rewards_of_an_environment_stay(tiny_path: str) -> None:
    then = config_of(Path("run"), tiny_path)
    env = EnvConfig(use="number_guessing")
    then, now = (then.model_copy(update={"env": env, "rewards": rewards}) for rewards in (then.rewards, []))
    with pytest.raises(WrongInput, match="rewards: must be as in the run with env.use"):
        check_possible(changes_of(then, now), then, now, 0)


def spoil_schema(run: Path) -> None:
    file = run / "rollouts" / "step-000001.parquet"
    rows = ledger.read(file)
    pq.write_table(rows.replace_schema_metadata({"gleaner.schema": "0"}), file)


def drop_a_group(run: Path) -> None:
    file = run / "rollouts" / "step-000001.parquet"
    pq.write_table(ledger.read(file).slice(4), file)


def break_a_logprob(run: Path) -> None:
    rows = ledger.read(run / "rollouts" / "step-000001.parquet")
    values = rows.column("behavior_logprobs").to_pylist()
    change(run, 1, "behavior_logprobs", [[float("nan"), *values[0][1:]], *values[1:]])


def other_base(run: Path) -> None:
    file = run / "checkpoints" / "step-000002" / "inputs.json"
    inputs = json.loads(file.read_text())
    inputs["base"]["config.json"] = "another"
    file.write_text(json.dumps(inputs))


def nothing(run: Path) -> None: ...


def whole_in_shards(run: Path) -> None:
    tree = yaml.safe_load((run / "config.yaml").read_text())
    del tree["learner"]["lora"]
    tree["learner"]["mode"] = "full"
    tree["memory"] |= {"layout": "sharded"}
    tree["cluster"] |= {"learners": 2}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))


def refused_configuration(run: Path) -> None:
    (run / "config.yaml").write_text("no_such_key: 1\n" + (run / "config.yaml").read_text())


@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    [
        (nothing, ["--to", "9"], r"--from, --to: must be 0 <= --from < --to <= 4, .*; got 0 and 9"),
        (nothing, ["--from", "3"], r"--from: must be 0 or the step of a kept checkpoint \(2\), got 3"),
        (spoil_schema, [], "step 1: .* cannot be read: .*schema version must be 7, got 0"),
        (drop_a_group, [], "step 1: .* must hold 2 groups, as the step had, and holds 1"),
        (break_a_logprob, [], "step 1: behavior_logprobs: must be finite, row 0 has nan"),
        (lambda run: (run / "rollouts" / "step-000002.parquet").unlink(), [], "step 2: .* has not both its rollouts"),
        (lambda run: shutil.rmtree(run / "rollouts"), [], "RUN: .* has no step with both its rollouts and its line"),
        (lambda run: (run / "config.yaml").unlink(), [], "RUN: .* has no config.yaml"),
        (refused_configuration, [], r"RUN: .* another version of gleaner, .*no_such_key: unknown key"),
        (whole_in_shards, [], "memory.layout: a replay has the whole model in one process"),
        (other_base, [], "model.path: must have the content that the run was made with, and config.json differs"),
        (shutil.rmtree, [], "run: must be a run folder"),
        (nothing, ["rollout.temperature=0.5"], "rollout.temperature: must be as in the run, whose completions"),
        (nothing, ["learner.groups_per_step=1"], "learner.groups_per_step: must be as in the run"),
        (nothing, ["--from", "2", "learner.lora.rank=16"], "learner.lora.rank: .* where a replay begins at a checkp"),
        (nothing, ["learner.lr=1"], "learner.lr: unknown key"),
        (nothing, ["rewards=[{use: gone.py:f}]"], "reward 'f'.*gone.py"),
        (nothing, ["--output", "."], "--output: must be a new folder or an empty one"),
        (nothing, ["--output", "/proc/none/replayed"], "--output: /proc/none/replayed cannot be written .No such file"),
    ],
    ids=[
        "a step that is not there", "no such checkpoint", "unknown schema", "a group is missing", "a broken logprob",
        "a gap", "no rollouts", "no configuration", "another version", "a model in shards", "another base", "no folder",
        "generation", "another batch", "another shape", "unknown key", "no such reward", "a folder in use", "nowhere",
    ],
)  # fmt: skip
def test_what_cannot_be_replayed_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], spoil: Any, words: list[str], said: str
) -> None:
    spoil(run)
    assert main(["replay", str(run), *words]) == 2
    assert re.search("error: " + said, capsys.readouterr().err)


# Where a metric broke: found at its step, and not where there is only noise or learning.

BISECT_STEPS = list(range(1, 61))
RISING = 1 / (1 + np.exp(-(np.arange(60) - 20) / 6))


def noise(seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=60)


def test_a_fall_is_found_at_its_step_and_nothing_where_there_is_none() -> None:
    fallen = [
        change_of(BISECT_STEPS, 0.05 * noise(seed) + RISING - 0.3 * (np.arange(60) >= 40), -1) for seed in range(50)
    ]
    places = [change.first for change in fallen if change is not None]
    assert len(places) >= 48
    assert sum(abs(place - 41) <= 1 for place in places) >= 47
    assert [change_of(BISECT_STEPS, noise(seed), direction) for seed in range(50) for direction in (-1, 1)] == [
        None
    ] * 100
    assert [change_of(BISECT_STEPS, 0.05 * noise(seed) + RISING, -1) for seed in range(50)] == [None] * 50
    assert change_of(BISECT_STEPS, [0.5] * 60, 0) is None
    counted = change_of(BISECT_STEPS, [0.0] * 50 + [1.0] * 10, 1)  # of values that are mostly equal
    assert counted is not None
    assert (counted.last, counted.first, counted.before, counted.after) == (50, 51, 0, 1)


@pytest.mark.parametrize(
    ("metric", "way"),
    [
        ("reward/mean", -1), ("reward/failed", 1), ("policy/mismatch_k3", 1), ("eval/accuracy", -1), ("loss/total", 0),
        ("env/found", 0), ("eval/found", 0), ("eval/lost", -1), ("env/malformed", 1), ("eval/malformed", 1),
        ("eval/turns", 0), ("eval/seconds", 1), ("eval/outcome_done", 0), ("eval/outcome_env_killed", 1),
        ("eval/outcome_correct", -1),
    ],
)  # fmt: skip
def test_which_way_is_worse(metric: str, way: int) -> None:
    """Of a run whose environment counts what was found, and with reward functions called lost and outcome_correct."""
    known = {
        "reward/lost",
        "reward/outcome_correct",
        *(f"env/{name}" for name in ("found", "turns", "malformed", "seconds")),
    }
    assert worse(metric, known) == way


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Its mismatch jumps at step 39, its reward falls at step 41; evaluated every ten steps."""
    (tmp_path / "rollouts").mkdir()
    reward, mismatch = 0.02 * noise(1) + 0.8, 1e-4 * (1 + 0.1 * noise(2))
    reward[40:] -= 0.5
    mismatch[38:] += 2e-3
    lines = [
        {"step": step, "at": 0.0, "reward/mean": r, "policy/mismatch_k3": k, "env/a[/b]": k}
        for step, r, k in zip(BISECT_STEPS, reward, mismatch, strict=True)
    ]
    for line in lines[9::10]:
        line["eval/accuracy"] = 0.8 - 0.6 * (line["step"] > 40) + 0.001 * line["step"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_what_broke_before_it_is_shown_with_it(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(broken), "--bisect", "reward/mean", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["change"]["last"], told["change"]["first"]) == (40, 41)
    assert told["change"]["after"] == pytest.approx(0.3, abs=0.05)
    assert told["others"]["policy/mismatch_k3"]["first"] == 39
    assert main(["replay", str(broken), "--bisect", "reward/mean"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "reward/mean fell from 0.8" in out
    assert "env/a[/b]" in out
    assert f"gleaner rollouts show {broken} --step 41 --worst" in out


def test_of_a_metric_that_is_not_there_at_each_step_the_steps_between_can_be_had(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(broken), "--bisect", "eval/accuracy"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "in steps 40 to 50" in out
    assert f"gleaner replay {broken} --to 45 --output at-45 && gleaner eval --run at-45" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bisect", "reward/maen"], "--bisect: must be a metric of the run, got reward/maen; did you mean reward/m"),
        (["--bisect", "reward/mean", "seed=1"], "--bisect: looks at what the run recorded and takes no step"),
        (["--bisect", "reward/mean", "--to", "4"], "--bisect: looks at what the run recorded and takes no step"),
    ],
)
def test_what_it_cannot_say(broken: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["replay", str(broken), *words]) == 2
    assert f"error: {said}" in capsys.readouterr().err


def test_few_values_say_nothing(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (broken / "metrics.jsonl").read_text().splitlines(keepends=True)
    (broken / "metrics.jsonl").write_text("".join(lines[:5]))
    assert main(["replay", str(broken), "--bisect", "reward/mean"]) == 2
    assert "needs at least 6 values of reward/mean" in capsys.readouterr().err
