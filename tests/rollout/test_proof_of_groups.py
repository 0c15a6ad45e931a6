"""A group that was sampled from several policies is handed over once the newest of them is proven."""

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rollout.fakes import make_group
from rollout.schema import Problem
from rollout.types import Completion, Sampling
from tests.rollout.test_producer import Story, Worker, consume, producing, push


async def test_a_group_waits_for_the_proof_of_the_newest_policy_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rollout(worker: Worker, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table:
        rows = [
            Completion(np.array([1], np.int32), np.array([-0.5], np.float32), "stop", np.array([version], np.int32))
            for version in (3, 4, 3)
        ]
        return make_group(problem.position, attempt=attempt, completions=rows, rewards=(1.0, 0.0, 0.5))

    monkeypatch.setattr(Worker, "rollout", rollout)
    story = Story(probe=lambda life, version: "slow" if version == 4 else None)
    async with producing(story, 1, tmp_path) as producer:
        assert await producer.feed.proof_of(3, 0)
        await producer.pipes.policy_slot.publish(4, push(4))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(producer.pipes.buffer) == 0
        story.gate.set()
        assert await consume(producer, 1) == [(0, 0)]
