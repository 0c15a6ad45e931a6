"""What a feed says of a policy that it brought."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.actor import Local
from cluster.buffer import PolicySlot
from cluster.config import Deadlines
from cluster.telemetry import Timeline
from rollout.delivery import (
    Answer,
    DeliveryError,
    Push,
    Receipt,
)
from rollout.producer import PolicyFeed, SupervisedWorker
from rollout.types import Adapter, Held
from tests.pushes import pushed, said


class Blind:
    """A worker whose engine reads back one of two tensors."""

    held = Held({"lora_A": "a"}, unread=("lora_B",))

    async def probe(self, token_ids: tuple[int, ...]) -> Answer:
        return said([-1.0])._replace(held=self.held)


async def test_what_cannot_be_read_back_is_said_once_and_what_is_read_must_be_right(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(tmp_path / "timeline.json")
    worker = SupervisedWorker(Local[Any]("generator-0", Blind, []), Deadlines())
    feed = PolicyFeed(worker, PolicySlot(), timeline)
    for version in (3, 4):
        await feed.prove(pushed(Adapter.build(version, b"", {}), (1, 2), said([-1.0])))
        assert await feed.proof_of(version, 0)
    sentence = (
        "generator-0: 1 tensors cannot be read back from its engine, first lora_B: only logprobs prove that they arrive"
    )
    assert [record.getMessage() for record in caplog.records] == [sentence]
    Blind.held = Held({"lora_A": "another"}, unread=("lora_B",))
    with pytest.raises(DeliveryError, match="acknowledged v5, but .* 1 of 2 differ, first lora_A"):
        await feed.prove(pushed(Adapter.build(5, b"", {}), (1, 2), said([-1.0])))
    assert feed._proven == 4
    timeline.close()


class TooLate:
    """A worker that is brought version 3, which the learner has overwritten by then."""

    async def take_policy(self, policy: Adapter) -> Receipt | None:
        if policy.version == 3:
            return None
        self.version = policy.version
        return Receipt(policy.digest, 0.0, 0.0)

    async def probe(self, token_ids: tuple[int, ...]) -> Answer:
        return said([-self.version])


@pytest.mark.parametrize("fresh", [True, False])
async def test_a_policy_that_was_overwritten_is_skipped_and_the_next_one_brought(tmp_path: Path, fresh: bool) -> None:
    timeline, slot = Timeline(tmp_path / "timeline.json"), PolicySlot[Push]()
    feed = PolicyFeed(SupervisedWorker(Local[Any]("generator-0", TooLate, []), Deadlines()), slot, timeline)
    pushes = {version: pushed(Adapter.build(version, b"", {}), (1, 2), said([-version])) for version in (2, 3, 4)}
    await slot.publish(2, pushes[2])
    following = asyncio.create_task(feed.follow(await feed.first()))
    await slot.publish(3, pushes[3])
    if fresh:
        await feed._leave()
        bringing = asyncio.create_task(feed._bring_newest())
    await asyncio.sleep(0.01)
    assert slot.acknowledgements == {"generator-0": 2}
    await slot.publish(4, pushes[4])
    if fresh:
        await bringing
    assert await feed.proof_of(4, feed.losses)
    assert slot.acknowledgements == {"generator-0": 4}
    following.cancel()
    timeline.close()
