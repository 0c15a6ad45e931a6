"""What a resumed run keeps of the record of its steps."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.actor import Local
from learner.driver.record import StepRecord, read_policies
from learner.trainer.service import Arithmetic
from rollout import ledger
from rollout.types import PolicyId
from tests.learner.rollouts import make_groups


class Learner:
    """Says what it computes with."""

    async def arithmetic(self) -> Arithmetic:
        return Arithmetic("2", "cpu", 1, "default")


async def taken(folder: Path, begin: int, end: int, digest: str) -> None:
    """A process of the run: from a checkpoint after step `begin` to `end`."""
    learner: Any = Local("learner", Learner, [])
    record = StepRecord(folder, end, learner, 5.0)
    await record.begin(begin)
    for step in range(begin, end + 1):
        if step > begin:
            record.rollouts(step, make_groups([[0.0, 1.0]], lambda _, ids: [-1.0] * len(ids), seed=step))
        record.policy(PolicyId(step, digest))


def lines(folder: Path) -> list[tuple[int, str, int]]:
    return [(line.step, line.sha256, line.total_steps) for line in read_policies(folder)]


def steps(folder: Path) -> list[str]:
    return [file.stem[-1] for file in ledger.steps(folder / "rollouts")]


@pytest.mark.parametrize("cut", [0, 9])
def test_a_resumed_run_takes_the_steps_after_its_checkpoint_anew(tmp_path: Path, cut: int) -> None:
    asyncio.run(taken(tmp_path, 0, 4, "first"))
    file = tmp_path / "policies.jsonl"
    file.write_text(file.read_text()[: -cut or None])  # where a kill cut the last line short
    asyncio.run(taken(tmp_path, 2, 3, "second"))
    assert lines(tmp_path) == [(0, "first", 4), (1, "first", 4), (2, "first", 4), (3, "second", 3)]
    assert steps(tmp_path) == ["1", "2", "3"]


def test_a_run_from_the_beginning_forgets_all(tmp_path: Path) -> None:
    asyncio.run(taken(tmp_path, 0, 4, "first"))
    asyncio.run(taken(tmp_path, 0, 1, "second"))
    assert lines(tmp_path) == [(0, "second", 1), (1, "second", 1)]
    assert steps(tmp_path) == ["1"]
