"""When a policy leaves the learner: the real loop, between fakes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster import machine
from cluster.actor import Local
from rollout.types import SentPolicy
from rollout.weight_sync import Receipt
from tests.learner.loops import PER_STEP, Trainer, Worker, build, configure, finish

RANKS = {"cluster": {"learners": 2}}


@pytest.mark.parametrize(
    ("learner", "others", "overwrites"),
    [
        ({"push": "merged"}, {}, True),
        ({}, {}, False),  # an adapter
        ({"push": "merged"}, RANKS, False),  # of which one may be lost with the policy that it has sent
        ({"mode": "full", "learning_rate": 1e-5}, RANKS | {"memory": {"base": "sharded"}}, True),
    ],
)
async def test_whole_weights_are_overwritten_only_when_every_generator_has_them(
    tmp_path: Path, learner: dict[str, Any], others: dict[str, Any], overwrites: bool
) -> None:
    held, asked = list[int](), list[tuple[str, ...]]()

    class Slow(Worker):
        async def take_policy(self, policy: SentPolicy) -> Receipt | None:
            await asyncio.sleep(0.02)
            held.append(policy.version)
            return await super().take_policy(policy)

    class Overwriting(Trainer):
        async def outgoing(self, readers: tuple[str, ...] = ()) -> Any:
            asked.append(readers)
            assert not overwrites or held == [version for version in range(self.version) for _ in range(2)]
            return await super().outgoing(readers)

    workers = [Local(f"generator-{rank}", Slow, [0.0, None]) for rank in range(2)]
    config = configure(max_staleness=1, learner={"groups_per_step": PER_STEP, **learner}, **others)
    await finish(build(tmp_path, config, 4, workers=workers, trainer=Local("learner", Overwriting, [0.0, 0.0])))
    assert asked == [(machine.name(),) * 2 if overwrites else ()] * 5
