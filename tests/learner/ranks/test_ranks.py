"""Several ranks seen as one learner: what reaches whom, how answers become one, and whose failure is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.system.local_run import FakeTrainer
from cluster.actor import ActorDied, Local, RemoteError, Unusable
from cluster.config import Deadlines
from learner.driver.failure import LearnerLost, WatchedLearner
from learner.ranks import ranks as module
from learner.ranks.ranks import IN_A_ROW, PEER_LOST, Meeting, Ranks, Regroup, Return, all_of
from learner.trainer.service import TrainerService
from rollout.delivery import Answer

GROUPS: list[Any] = ["a group"]


class FakeRank(FakeTrainer):
    """Step n of rank r takes n - r seconds and n + r bytes. Any group will do.

    meets: what each rank was told as they met. doomed: (rank, method) whose next call kills that process.
    """

    def __init__(self, rank: int, meets: list[Any], doomed: list[tuple[int, str]]) -> None:
        super().__init__(vocab_size=8)
        self.rank, self.meets, self.doomed, self.dead = rank, meets, doomed, False

    def living(self, method: str) -> None:
        if (self.rank, method) in self.doomed:
            self.doomed.remove((self.rank, method))
            self.dead = True
        if self.dead:
            raise Unusable("killed")

    async def open(self, host: str, start_s: float) -> int:
        return 1

    async def rejoin(self, meeting: Meeting, address: str, back: Return) -> None:
        self.living("rejoin")
        self.meets.append((self.rank, back))
        self.version = back.undo - 1 if back.undo is not None else 2

    async def pulse(self) -> float:
        self.living("pulse")
        return await super().pulse()

    async def outgoing(self, stays: bool = False) -> Any:
        self.living("outgoing")
        return await super().outgoing()

    async def numbered_step(self, groups: list[Any], number: int) -> dict[str, float]:
        assert groups is GROUPS
        self.living("step")
        metrics = await super().step(groups)
        return metrics | {"time/train": self.version - self.rank, "memory/learner_peak": self.version + self.rank}

    async def mismatch(self) -> pa.Array:
        """Of four rows, the last of which nobody trained on."""
        rows = [[np.float16(row)] if row == self.rank else None for row in range(4)]
        return pa.array(rows, pa.list_(pa.float16()))

    async def sees(self, file: Path) -> bool:
        return self.rank == 0


class Process(Local[Any]):
    """In this one."""

    address = "here"

    async def kill(self) -> None:
        self._object.dead = True


def several(kinds: list[Any], meets: list[Any], doomed: list[tuple[int, str]], *, replaces: bool = True) -> Ranks:
    ranks = [Process(f"learner-{rank}", kind, [rank, meets, doomed]) for rank, kind in enumerate(kinds)]
    return Ranks(ranks, Regroup(ranks, Deadlines(start=1, step=1, heartbeat=0.4), replaces=replaces))


@pytest.fixture
def learner() -> Ranks:
    return several([FakeRank] * 3, [], [])


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
    assert (await learner.call(TrainerService.outgoing, 1))[1].policy_id.version == 2


@pytest.mark.parametrize("lost", [[0], [2], [0, 1]])
async def test_lost_ranks_are_replaced_and_the_step_is_taken_again(
    lost: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    meets: list[Any] = []
    learner = several([FakeRank] * 3, meets, [(rank, "step") for rank in lost])
    source = next(rank for rank in range(3) if rank not in lost)
    for version in (1, 2):
        assert (await learner.call(TrainerService.step, 1, GROUPS))["loss/total"] == version
    assert await learner.call(TrainerService.pulse, 1) == 6
    assert sorted(meets) == [(rank, Return(source, 1)) for rank in range(3)]
    names = ", ".join(f"learner-{rank}" for rank in lost)
    assert f"{names}: a fresh process gets the state of learner-{source}; the step is taken again" in caplog.text


async def test_between_two_steps_nothing_is_undone() -> None:
    meets: list[Any] = []
    learner = several([FakeRank] * 2, meets, [(0, "outgoing")])
    for _ in range(2):
        await learner.call(TrainerService.step, 1, GROUPS)
    assert (await learner.call(TrainerService.outgoing, 1))[1].policy_id.version == 2
    assert sorted(meets) == [(0, Return(1, None)), (1, Return(1, None))]


async def test_what_was_asked_before_a_step_is_asked_again_before_it() -> None:
    """The probe is of the policy before the step, in which both calls lose rank 0."""

    class Slow(FakeRank):
        async def probe(self, token_ids: list[int]) -> Answer:
            await asyncio.sleep(0.1)
            self.living("probe")
            return await super().probe(token_ids)

        async def numbered_step(self, groups: list[Any], number: int) -> dict[str, float]:
            if not self.meets:
                await asyncio.sleep(0.05)
            return await super().numbered_step(groups, number)

    learner = several([Slow] * 2, [], [(0, "step")])
    probe = asyncio.create_task(learner.call(TrainerService.probe, 1, [1, 2, 3]))
    step = asyncio.create_task(learner.call(TrainerService.step, 1, GROUPS))
    expected = await several([FakeRank] * 2, [], []).call(TrainerService.probe, 1, [1, 2, 3])
    assert (await probe).held == expected.held
    assert (await step)["loss/total"] == 1


async def test_a_fresh_process_that_is_lost_as_it_joins_is_replaced_as_well() -> None:
    """With it rank 2, while rank 0 has what the step began with."""
    meets: list[Any] = []
    learner = several([FakeRank] * 3, meets, [(1, "step"), (1, "rejoin"), (2, "rejoin")])
    for version in (1, 2):
        assert (await learner.call(TrainerService.step, 1, GROUPS))["loss/total"] == version
    assert {back for _, back in meets} == {Return(0, 1)}
    assert sorted(rank for rank, _ in meets[-3:]) == [0, 1, 2]


@pytest.mark.parametrize(
    "doomed",
    [[(0, "step"), (1, "step")], [(1, "step")] * (IN_A_ROW + 1), [(1, "step"), (0, "rejoin")]],
    ids=["nobody is left", "again and again", "the one that has the state in the meantime"],
)
async def test_a_loss_that_cannot_be_made_good_is_a_lost_learner(doomed: list[tuple[int, str]]) -> None:
    with pytest.raises(ActorDied, match="learner-[01]: killed"):
        await several([FakeRank] * 2, [], doomed).call(TrainerService.step, 1, GROUPS)


class Stuck(FakeRank):
    async def numbered_step(self, groups: list[Any], number: int) -> Any:
        if self.meets:  # the fresh process does not hang
            return await super().numbered_step(groups, number)
        return await self.hang()

    async def pulse(self) -> float:
        return await (super().pulse() if self.meets else self.hang())

    async def hang(self) -> Any:
        while not self.dead:
            await asyncio.sleep(0.01)
        raise Unusable("killed")


async def test_a_rank_that_hangs_is_killed_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    hangs = several([FakeRank, Stuck], [], [])
    told = await WatchedLearner(hangs, silence_s=9).call(TrainerService.step, 9, GROUPS)
    assert told["loss/total"] == 1
    assert "learner-1: pulse gave no answer within 0.2 s" in caplog.text
    assert "learner-1: a fresh process gets the state of learner-0; the step is taken again" in caplog.text


async def test_a_hang_that_was_made_good_is_not_why_the_learner_is_lost_later() -> None:
    learner = several([FakeRank, Stuck], [], [(1, "step")] * IN_A_ROW)
    with pytest.raises(LearnerLost, match="learner-1: killed"):
        await WatchedLearner(learner, silence_s=9).call(TrainerService.step, 9, GROUPS)


async def test_a_rank_that_hangs_and_is_not_replaced_is_why_the_learner_is_lost() -> None:
    hangs = several([FakeRank, Stuck], [], [], replaces=False)
    with pytest.raises(LearnerLost, match="learner-1: pulse gave no answer within 0.2 s: it hangs, and is killed"):
        await WatchedLearner(hangs, silence_s=9).call(TrainerService.step, 9, GROUPS)


async def test_a_rank_that_hangs_between_two_steps_is_killed_before_the_call_is_given_up() -> None:
    """The deadline of a push is shorter than the heartbeat by which a rank is known to hang."""

    class Silent(Stuck):
        async def outgoing(self, stays: bool = False) -> Any:
            return await (super().outgoing() if self.meets else self.hang())

    meets: list[Any] = []
    learner = several([Silent, FakeRank], meets, [])
    assert (await learner.call(TrainerService.outgoing, 0.01))[1].policy_id.version == 2
    assert sorted(meets) == [(0, Return(1, None)), (1, Return(1, None))]


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
