"""Several ranks seen as one learner: what reaches whom, how answers become one, and whose failure is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cluster.actor import ActorDied, Local, RemoteError, Unusable
from learner.driver.fake_trainer import FakeTrainer
from learner.driver.watched_learner import LearnerLost, WatchedLearner
from learner.ranks import ranks as module
from learner.ranks.ranks import Ranks, all_of
from learner.ranks.service import PEER_LOST
from learner.trainer.service import TrainerService

GROUPS: list[Any] = ["a group"]


class FakeRank(FakeTrainer):
    """Step n of rank r takes n - r seconds and n + r bytes. Any group will do."""

    def __init__(self, rank: int) -> None:
        super().__init__(vocab_size=8)
        self.rank = rank

    async def step(self, groups: list[Any]) -> dict[str, float]:
        assert groups is GROUPS
        metrics = await super().step(groups)
        return metrics | {"time/train": self.version - self.rank, "memory/learner_peak": self.version + self.rank}

    async def mismatch(self) -> pa.Array:
        """Of four rows, the last of which nobody trained on."""
        rows = [[np.float16(row)] if row == self.rank else None for row in range(4)]
        return pa.array(rows, pa.list_(pa.float16()))

    async def sees(self, file: Path) -> bool:
        return self.rank == 0


@pytest.fixture
def learner() -> Ranks:
    made: Any = FakeRank
    return Ranks([Local(f"learner-{rank}", made, [rank]) for rank in range(3)])


async def test_a_step_is_everybodys_and_a_save_is_rank_0s(learner: Ranks, tmp_path: Path) -> None:
    for _ in range(2):
        told = await learner.call(TrainerService.step, 1, GROUPS)
    assert told == {"loss/total": 2, "time/train": 2, "memory/learner_peak": 4}
    assert await learner.call(TrainerService.pulse, 1) == 6
    assert not await learner.call(TrainerService.sees, 1, tmp_path)
    assert (await learner.call(TrainerService.mismatch, 1)).to_pylist() == [[0], [1], [2], None]
    await learner.call(TrainerService.save, 1, tmp_path / "saved")
    await learner.call(TrainerService.step, 1, GROUPS)
    await learner.call(TrainerService.load, 1, tmp_path / "saved")
    assert await learner.call(TrainerService.pulse, 1) == 6
    assert (await learner.call(TrainerService.policy, 1))[0].version == 2


class Stuck(FakeRank):
    async def step(self, groups: list[Any]) -> dict[str, float]:
        await asyncio.sleep(60)
        return {}

    async def pulse(self) -> float:
        await asyncio.sleep(60)
        return 0


async def test_a_rank_that_hangs_is_a_learner_that_hangs() -> None:
    kinds: list[Any] = [FakeRank, Stuck]
    several = Ranks([Local(f"learner-{rank}", kind, [rank]) for rank, kind in enumerate(kinds)])
    with pytest.raises(LearnerLost, match="learner: step is without an answer"):
        await WatchedLearner(several, silence_s=0.2).call(TrainerService.step, 5, GROUPS)


MISSED = ActorDied("learner-0: another rank is gone", reason=f"{PEER_LOST} (closed)")


async def after(seconds: float, error: Exception) -> None:
    await asyncio.sleep(seconds)
    raise error


@pytest.mark.parametrize("error", [ActorDied("learner-1: killed"), RemoteError("learner-1: step failed")])
async def test_the_rank_that_failed_by_itself_is_named(error: Exception) -> None:
    """Whoever missed it was the first to speak."""
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(type(error), match="learner-1"):
        await all_of([after(0, MISSED), after(0.05, error), never])
    assert never.cancelled()


async def test_a_rank_that_is_missed_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    with pytest.raises(ActorDied, match="another rank is gone"):
        await all_of([after(0, MISSED), asyncio.get_running_loop().create_future()])


async def test_what_a_rank_says_of_another_is_known_as_that() -> None:
    async def lost() -> None:
        raise Unusable(f"{PEER_LOST} (Connection closed)")

    class Lost(FakeTrainer):
        async def release_cache(self) -> None:
            await lost()

    with pytest.raises(ActorDied) as caught:
        await Local("learner-0", Lost, [8]).call(TrainerService.release_cache, 1)
    assert module._missed_another(caught.value)
