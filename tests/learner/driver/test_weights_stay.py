"""Whole weights that stay in the learner's memory, which has room for two: the real loop, between fakes."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from cluster.actor import Local, Unusable
from learner.driver.local_run import local_run
from rollout.service import RolloutService
from rollout.types import SentPolicy
from rollout.weight_sync import Receipt
from tests.learner.loops import PER_STEP, Trainer, Worker, build, configure, consumed, finish

RANKS = {"cluster": {"learners": 2}}
MERGED = {"push": "merged", "groups_per_step": PER_STEP}
WHOLE = {"mode": "full", "learning_rate": 1e-5, "groups_per_step": PER_STEP}


class Memory:
    """What the learner has written, and the policies that were gone when a generator came for them."""

    def __init__(self) -> None:
        self.asked, self.newest, self.late = list[bool](), -1, list[int]()

    def trainer(self) -> Local[Any]:
        memory = self

        class Staying(Trainer):
            async def outgoing(self, stays: bool = False) -> Any:
                memory.asked.append(stays)
                memory.newest = self.version
                return await super().outgoing(stays)

        return Local("learner", Staying, [0.0, 0.0])

    def worker(self, rank: int, *, slow_s: float = 0.0, dies_at_wake: int = 0) -> Local[Any]:
        memory, wakes = self, itertools.count(1)

        class Reading(Worker):
            async def take_policy(self, policy: SentPolicy) -> Receipt | None:
                await asyncio.sleep(slow_s)
                if policy.version < memory.newest - 1:
                    memory.late.append(policy.version)
                    return None
                return await super().take_policy(policy)

            async def wake(self) -> None:
                if next(wakes) == dies_at_wake:
                    raise Unusable("killed while it slept")
                await super().wake()

        return Local(f"generator-{rank}", Reading, [0.0, None])


@pytest.mark.parametrize(
    ("learner", "others", "stays"),
    [
        (MERGED, {}, True),
        ({"groups_per_step": PER_STEP}, {}, False),  # an adapter
        (MERGED, RANKS, False),  # of which one may be lost with the policy that it has sent
        (WHOLE, RANKS | {"memory": {"base": "sharded"}}, True),
    ],
)
async def test_no_generator_that_is_waited_for_comes_too_late(
    tmp_path: Path, learner: dict[str, Any], others: dict[str, Any], stays: bool
) -> None:
    memory = Memory()
    workers = [memory.worker(rank, slow_s=0.01 * rank) for rank in range(2)]
    config = configure(max_staleness=2, learner=learner, **others)
    await finish(build(tmp_path, config, 6, workers=workers, trainer=memory.trainer()))
    assert (memory.asked, memory.late) == ([stays] * 7, [])


async def test_weights_do_not_stay_for_generators_of_other_machines(tmp_path: Path) -> None:
    memory, config = Memory(), configure(learner=MERGED)
    run = local_run(tmp_path, config, 2, generators=[memory.worker(0)], trainer=memory.trainer(), one_machine=False)
    await run.finish()
    assert memory.asked == [False] * 3


async def test_one_that_is_lost_in_the_learners_turn_is_brought_what_was_published(tmp_path: Path) -> None:
    """The learner has written the next policy by then, and waits for the generators before it is published."""
    memory = Memory()
    worker = memory.worker(0, dies_at_wake=3)
    loop = build(tmp_path, configure(learner=MERGED), 5, workers=[worker], trainer=memory.trainer(), alternating=True)
    await worker.call(RolloutService.sleep, 1)
    async with asyncio.timeout(20):
        await finish(loop)
    assert consumed(tmp_path) == [list(range(3 * step, 3 * step + 3)) for step in range(5)]
