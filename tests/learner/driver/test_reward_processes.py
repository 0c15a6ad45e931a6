"""The watch over reward processes of their own, without Ray: what it does when, and how long it waits."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from cluster.actor import ActorDied, DeadlineExceeded
from cluster.config import Deadlines
from learner.driver.failure import RunEnded
from learner.driver.launch import Patience, kept_answering

PATIENCE = Patience(silence_s=4.0, start_s=7.0)


class Process:
    """A Remote[RewardServer] that is lost as it is told, again and again."""

    name = "rewards-0"

    def __init__(self, *answers: Exception, starts: Exception | None = None) -> None:
        self.answers, self.starts = [*answers], starts
        self.calls: list[tuple[str, float]] = []

    async def until_ended(self, silence_s: float) -> None:
        self.calls.append(("until_ended", silence_s))
        if not self.answers:
            raise asyncio.CancelledError  # the end of the test
        raise self.answers.pop(0)

    async def restart(self) -> None:
        self.calls.append(("restart", 0.0))

    async def ready(self, deadline_s: float) -> None:
        self.calls.append(("ready", deadline_s))
        if self.starts is not None:
            raise self.starts


async def watched(process: Process) -> list[str]:
    with pytest.raises(asyncio.CancelledError):
        await kept_answering(cast(Any, process), PATIENCE)
    return [name for name, _ in process.calls]


async def test_one_that_hangs_is_ended_and_one_that_ended_is_not() -> None:
    hung = Process(DeadlineExceeded("rewards-0: pulse gave no answer"))
    assert await watched(hung) == ["until_ended", "restart", "ready", "until_ended"]
    assert dict(hung.calls) == {"until_ended": 4.0, "restart": 0.0, "ready": 7.0}
    assert await watched(Process(ActorDied("rewards-0: died"))) == ["until_ended", "ready", "until_ended"]


async def test_where_no_fresh_process_starts_the_run_ends_with_its_name() -> None:
    process = Process(ActorDied("rewards-0: died"), starts=DeadlineExceeded("rewards-0: start gave no answer"))
    with pytest.raises(RunEnded, match="^rewards-0: it was lost, and no fresh process has started within 7 s"):
        await kept_answering(cast(Any, process), PATIENCE)


async def test_one_that_is_lost_again_and_again_ends_the_run() -> None:
    process = Process(*[ActorDied("rewards-0: died of a group")] * 7)
    with pytest.raises(RunEnded, match="^rewards-0: died of a group; it was lost 6 times in a row"):
        await kept_answering(cast(Any, process), PATIENCE)
    slow = Patience(silence_s=0.0, start_s=7.0)  # so long after the one before, a loss is the first again
    with pytest.raises(asyncio.CancelledError):
        await kept_answering(cast(Any, Process(*[ActorDied("rewards-0: died")] * 7)), slow)


@pytest.mark.parametrize(
    ("group", "heartbeat", "start", "wanted"),
    [(900, 300, 600, (150, 450)), (900, 300, 100, (150, 100)), (120, 300, 600, (30, 60))],
)
def test_generators_that_wait_for_it_are_not_taken_for_hung(
    group: float, heartbeat: float, start: float, wanted: tuple[float, float]
) -> None:
    found = Patience.of(Deadlines(group=group, heartbeat=heartbeat, start=start))
    assert (found.silence_s, found.start_s) == wanted
    assert found.silence_s + found.start_s < group
