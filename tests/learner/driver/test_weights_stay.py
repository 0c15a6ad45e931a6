"""Whole weights that stay in the learner's memory, which has room for two: the real loop, between fakes."""

from __future__ import annotations

import asyncio
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.system.local_run import local_run
from cluster.actor import Local, Unusable
from learner.config.arrangement import ARRANGEMENTS
from learner.driver.roles import weights_stay
from rollout.delivery import Receipt
from rollout.service import RolloutService
from rollout.types import SentPolicy, WeightsInFile
from tests.learner.loops import PER_STEP, Trainer, Worker, configure, consumed

RANKS = {"cluster": {"learners": 2}}
SHARDS = RANKS | {"memory": {"layout": "sharded"}}
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


async def test_no_generator_that_is_waited_for_comes_too_late(tmp_path: Path) -> None:
    memory = Memory()
    workers = [memory.worker(rank, slow_s=0.01 * rank) for rank in range(2)]
    config = configure(max_staleness=2, learner=MERGED)
    await local_run(tmp_path, config, 6, generators=workers, trainer=memory.trainer(), weights_stay=True).finish()
    assert (memory.asked, memory.late) == ([True] * 7, [])


async def test_one_that_is_lost_in_the_learners_turn_is_brought_what_was_published(tmp_path: Path) -> None:
    """The learner has written the next policy by then, and waits for the generators before it is published."""
    memory = Memory()
    worker = memory.worker(0, dies_at_wake=3)
    config = configure(learner=MERGED)
    loop = local_run(
        tmp_path,
        config,
        5,
        generators=[worker],
        trainer=memory.trainer(),
        arrangement=ARRANGEMENTS["alternating"],
        weights_stay=True,
    )
    await worker.call(RolloutService.sleep, 1)
    async with asyncio.timeout(20):
        await loop.finish()
    assert memory.asked == [True] * 6
    assert consumed(tmp_path) == [list(range(3 * step, 3 * step + 3)) for step in range(5)]


class Placed:
    """A session that has put each role on the node of that number."""

    def __init__(self, **nodes: int) -> None:
        self._nodes = {name.replace("_", "-"): node for name, node in nodes.items()}

    def node_of(self) -> dict[str, int]:
        return self._nodes


class Trying(Worker):
    """answer: what comes of its try."""

    def __init__(self, answer: str | Exception) -> None:
        super().__init__(0.0, None)
        self.answer = answer

    async def reaches(self, place: WeightsInFile) -> str:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


ALONE = Placed(generator_0=0, generator_1=0, learner=0)


@pytest.mark.parametrize(
    ("learner", "others", "placed", "answers", "stay", "said"),
    [
        (MERGED, {}, ALONE, ["", ""], True, ""),
        ({"groups_per_step": PER_STEP}, {}, ALONE, ["", ""], False, ""),  # an adapter
        (MERGED, {}, Placed(generator_0=0, generator_1=1, learner=0), ["", ""], False, ""),
        (MERGED, {}, ALONE, ["", "a sandbox"], False, "whole weights go through Ray's object store, .*: a sandbox"),
        (MERGED, {}, ALONE, ["", Unusable("killed")], False, ""),
        # Of several ranks one may be lost with the policy that it has sent, unless all are lost with it.
        (MERGED, RANKS, Placed(generator_0=0, generator_1=0, learner_0=0, learner_1=0), ["", ""], False, ""),
        (WHOLE, SHARDS, Placed(generator_0=0, generator_1=0, learner_0=0, learner_1=0), ["", ""], True, ""),
    ],
)
async def test_weights_stay_where_every_generator_can_read_them(
    learner: dict[str, Any],
    others: dict[str, Any],
    placed: Any,
    answers: list[Any],
    stay: bool,
    said: str,
) -> None:
    notes = list[str]()
    config = configure(learner=learner, rollout={"workers": 2}, **others)
    generators = [Local(f"generator-{rank}", Trying, [answer]) for rank, answer in enumerate(answers)]
    assert await weights_stay(config, placed, Memory().trainer(), generators, notes.append) == stay
    assert len(notes) == bool(said)
    assert re.match(said, "".join(notes))
