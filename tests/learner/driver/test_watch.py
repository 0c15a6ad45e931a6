"""A run with a watch: what its steps record of it, and what console, report and Python say when reward and watch part.
Runs are whole ones in one process, without a model: the real loop, between a fake trainer and workers whose rewards
are drawn by the policy's version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.system.local_run import VOCAB
from cluster.actor import Local
from learner.api.calls import TrainResult
from learner.config import RunConfig
from learner.config.load import to_yaml
from learner.driver.metrics import RewardWatch, within_groups
from learner.tools.report.page import blocks_of, unpacked
from rollout.fakes import FakeEngine, FakeWorker, make_group
from rollout.schema import SCHEMA, Problem
from rollout.types import Completion, Sampling
from tests.learner.loops import PER_STEP, build, configure, lines

STEPS = 40
WATCHED = {"rewards": [{"use": "odd"}, {"use": "number", "watch": True, "name": "strict"}]}


class Drifting(FakeWorker):
    """Rewards rise with the policy's version; the watch rises with them, or falls: an exploit."""

    def __init__(self, rank: int, honest: bool) -> None:
        super().__init__(FakeEngine(VOCAB), rank)
        self._honest = honest

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
        group = await super().rollout(problem, sampling, attempt)
        if group is None:
            return None
        chance = np.random.default_rng(problem.position)
        learned = min(problem.position / (PER_STEP * STEPS), 1.0)  # problems come in order, so by the steps
        passed = 0.2 + 0.6 * learned if self._honest else 0.7 - 0.6 * learned
        paid = chance.random(len(group)) < 0.1 + 0.8 * learned
        strict = chance.random(len(group)) < passed
        parts = [
            [{"name": "odd", "value": float(p)}, {"name": "strict", "value": float(s)}]
            for p, s in zip(paid, strict, strict=True)
        ]
        for name, values in (("reward", paid.astype(float).tolist()), ("reward_parts", parts)):
            field = SCHEMA.field(name)
            group = group.set_column(SCHEMA.get_field_index(name), field, pa.array(values, field.type))
        return group


Run = Callable[..., Awaitable[list[str]]]


@pytest.fixture
def drifted(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs up to a step, from the checkpoint `after` another if that is not 0. Returns what was said of the watch:
    during the run, and at its end."""

    async def run_one(folder: Path, config: RunConfig, honest: bool, steps: int = STEPS, after: int = 0) -> list[str]:
        workers = [Local(f"generator-{rank}", Drifting, [rank, honest]) for rank in range(2)]
        run = build(folder, config, steps, workers=workers, resume_step=after)
        said: list[str] = []
        monkeypatch.setattr(run.sinks.progress, "note", said.append)
        await run.finish(folder / "checkpoints" / f"step-{after:06d}" if after else None)
        return [*(line for line in said if "'strict'" in line), *run.loop.metrics.watch.advice()]

    return run_one


def settings(folder: Path, **more: Any) -> RunConfig:
    rollout = {"num_generations": 16}
    config = configure(output_dir=str(folder.parent), name=folder.name, rollout=rollout, **WATCHED, **more)
    (folder / "config.yaml").write_text(to_yaml(config))
    return config


def remarks(folder: Path) -> list[str]:
    _, blocks = blocks_of(folder, None, 2**20)
    return [said for said in unpacked(blocks["head"])["runs"][0]["remarks"] if "watch" in said]


async def test_an_exploit_is_told_once_in_the_run_at_its_end_in_the_report_and_in_python(
    tmp_path: Path, drifted: Run
) -> None:
    *told, last = await drifted(tmp_path, settings(tmp_path), honest=False)
    checks = [check for said in told for check in ("has not followed", "has fallen") if check in said]
    assert len(checks) == len(set(checks)) == len(told), "each check speaks once"
    assert "has fallen" in checks
    assert all(said.startswith("step 2") for said in told)
    assert last.endswith("(docs/rewards.md, A watch)")
    assert remarks(tmp_path) == [f"Advice: {last}."]
    assert TrainResult(tmp_path, None, None, []).advice[0] == last
    charts = {
        figure["title"]: figure["metrics"] for figure in unpacked(blocks_of(tmp_path, None, 0)[1]["head"])["figures"]
    }
    assert charts["Reward less watch"] == ["watch/gap_strict"]
    assert {"reward/mean", "reward/odd", "reward/strict"} == {*charts["Reward"]}
    for line in lines(tmp_path)[1:]:
        assert line["watch/gap_strict"] == pytest.approx(line["reward/mean"] - line["reward/strict"])
        assert line["watch/failed_strict"] == 0.0


async def test_an_honest_run_of_the_same_length_has_none(tmp_path: Path, drifted: Run) -> None:
    assert await drifted(tmp_path, settings(tmp_path), honest=True) == []
    assert remarks(tmp_path) == []
    assert not [said for said in TrainResult(tmp_path, None, None, []).advice if "watch" in said]


async def test_a_resumed_run_knows_the_steps_before(tmp_path: Path, drifted: Run) -> None:
    """It sees what the whole run would, too few steps of its own or not, and does not say again what was said."""
    config = settings(tmp_path)
    assert await drifted(tmp_path, config, honest=False, steps=12) == []
    *told, last = await drifted(tmp_path, config, honest=False, steps=30, after=12)
    assert told
    assert all(said.startswith("step 2") for said in told)
    assert last.startswith("from steps 1-10 to steps 21-30 ")
    (again,) = await drifted(tmp_path, config, honest=False, steps=32, after=30)
    assert again.startswith("from steps 1-10 to steps 23-32 ")


def completions(*lengths: int) -> list[Completion]:
    return [Completion(np.zeros(n, np.int32), np.zeros(n, np.float32), "stop", np.zeros(n, np.int32)) for n in lengths]


def test_what_a_batch_records_by_hand(tmp_path: Path) -> None:
    config = configure(**WATCHED)
    odd: list[float | None] = [1.0, 0.0, 1.0, None]
    parts = [[("odd", o), ("strict", s)] for o, s in zip(odd, [1.0, 0.0, float("nan"), 0.5], strict=True)]
    same, longer = completions(2, 2, 2, 2), completions(2, 1)
    one = make_group(0, completions=same, rewards=odd, reward_parts=parts, reward_status=["ok", "ok", "ok", "error"])
    told = [[("odd", 2.0), ("strict", 0.0)], [("odd", 1.0)]]
    two = make_group(1, completions=longer, rewards=[2.0, 1.0], reward_parts=told)
    found = RewardWatch(config.rewards, tmp_path).batch([one, two])
    assert found["watch/failed_strict"] == 1 / 6
    assert found["watch/gap_strict"] == pytest.approx((0.0 + 0.0 + 2.0) / 3)
    assert found["watch/correlation_strict"] == pytest.approx(1.0)
    assert found["watch/length_correlation"] == pytest.approx((1 / 2 / 2 * 2) / np.sqrt((1 / 2) * (2 / 3 + 1 / 2)))
    assert "watch/length_correlation" not in RewardWatch(config.rewards, tmp_path).batch([one])  # all of one length
    assert RewardWatch(configure().rewards, tmp_path).batch([one, two]) == {}


def test_the_correlation_is_within_groups() -> None:
    """Across these groups the numbers rise together, within each they part. What lacks its other is left out."""
    one, other = np.asarray([1.0, 2.0, np.nan]), np.asarray([11.0, 10.0, 50.0])
    assert within_groups([one, one + 10], [other, other + 10]) == pytest.approx(-1.0)
    assert within_groups([one, one], [other, np.asarray([10.0, 11.0, 0.0])]) == pytest.approx(0.0)
    assert within_groups([one], [np.ones(3)]) is None
    assert within_groups([np.full(2, np.nan)], [np.ones(2)]) is None
