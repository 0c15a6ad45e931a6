"""Deadlines of a process that is stopped and goes on; a process that several runs share."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest

from cluster import actor
from cluster.actor import ActorDied, Awake, Several, SharedProcess, within


class Clock:
    """In the place of time.monotonic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def passes(self, seconds: float, clock: Awake, every: float = 1.0) -> float:
        """What is left after so many seconds in which it is looked at."""
        end, left = self.now + seconds, clock.left()
        while self.now < end:
            self.now = min(self.now + every, end)
            left = clock.left()
        return left


def test_only_seconds_in_which_it_is_looked_at_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    awake = Awake(60)
    assert clock.passes(20, awake) == 40
    assert clock.passes(3600, awake, every=3600) == 40  # a lid that was closed for an hour
    assert clock.passes(20, awake, every=1.9) == pytest.approx(20)  # of a busy machine, each look comes late
    assert clock.passes(15, awake) == 5
    assert clock.passes(100, awake, every=10) == 10  # others get time to wake, at the very end, too
    assert clock.passes(10, awake) == 0
    assert awake.lost == 3700


@pytest.mark.parametrize(("seconds", "left"), [(0.5, 0.5), (4.0, 4.0), (30.0, 20.0)])
def test_a_short_deadline_is_whole_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch, seconds: float, left: float
) -> None:
    clock = Clock(monkeypatch)
    awake = Awake(seconds)
    clock.passes(min(seconds - 0.1, 10), awake, every=0.1)
    assert clock.passes(50, awake, every=50) == pytest.approx(left)


async def test_it_is_asyncios_timeout_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "LOOK_S", 0.01)
    with pytest.raises(TimeoutError):
        async with within(0.03) as limit:
            await asyncio.sleep(60)
    assert limit.expired()
    assert not limit.stood_still()
    async with within(None) as limit, within(float("inf")), within(60):
        await asyncio.sleep(0)
    assert not limit.expired()
    with pytest.raises(ZeroDivisionError):
        async with within(60):
            raise ZeroDivisionError
    with pytest.raises(TimeoutError, match="its own"):
        async with within(60) as limit:
            raise TimeoutError("its own")
    assert not limit.expired()
    outer = asyncio.create_task(_sleeping())
    await asyncio.sleep(0)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer


async def _sleeping() -> None:
    async with within(60):
        await asyncio.sleep(60)


async def test_who_gets_on_has_all_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    async with within(10) as limit:
        assert clock.passes(9, limit._clock) == 1
        limit.restart()
        assert clock.passes(9, limit._clock) == 1
    assert not limit.expired()


# A caller whose answer comes while it stands still, on either of the event loops that are in use. By the clock its
# deadline is over as it wakes.
WAITS = """
import asyncio, sys, uvloop
from cluster import actor
actor.LOOK_S, actor.LATE_S = 0.05, 0.1

async def run():
    async with actor.within(0.3) as limit:
        print("waits", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print("answered", limit.stood_still(), flush=True)

asyncio.run(run()) if sys.argv[1] == "asyncio" else uvloop.run(run())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_process_that_was_stopped_for_longer_than_its_deadline_has_its_answer(loop: str) -> None:
    command = [sys.executable, "-c", WAITS, loop]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        os.kill(process.pid, signal.SIGSTOP)
        while "T (stopped)" not in Path(f"/proc/{process.pid}/status").read_text():
            time.sleep(0.01)
        time.sleep(0.5)  # that it has been stopped for so long is what is tested
        process.stdin.write("\n")
        process.stdin.flush()
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.read() == "answered True\n"


# A process that several runs share.


class Counted:
    """An object of a shared process; `lost` calls end it."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def tell(self, word: str) -> str:
        return f"{self.name} {word}"


class Process:
    """The actor of a shared process that starts slowly and counts its starts."""

    name = "generator-0"

    def __init__(self) -> None:
        self.starts, self.fails = 1, 0
        self.objects = Several([Counted("first"), Counted("second")])

    async def call(self, method: Any, deadline_s: float, /, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self.objects, method.__name__)(*args, **kwargs)

    async def until_ended(self, silence_s: float) -> None:
        await asyncio.Event().wait()

    async def revive(self, deadline_s: float) -> None:
        await asyncio.sleep(0.01)
        self.starts += 1
        if self.fails > 0:
            self.fails -= 1
            raise ActorDied("lost again")


async def test_each_run_has_its_own_object_of_a_shared_process() -> None:
    shared = SharedProcess(cast(Any, Process()))
    told = [await shared.of_run(run).call(Counted.tell, 1.0, "here") for run in (0, 1)]
    assert told == ["first here", "second here"]


async def test_a_shared_process_is_replaced_once_for_all_runs_that_lost_it() -> None:
    process = Process()
    shared = SharedProcess(cast(Any, process))
    ends = [shared.of_run(run) for run in (0, 1, 2)]
    await asyncio.gather(ends[0].revive(1.0), ends[1].revive(1.0))
    await ends[2].revive(1.0)  # it notices the loss only after the replacement
    assert (process.starts, shared.lives) == (2, 1)
    await ends[2].revive(1.0)  # of the fresh process
    await ends[0].revive(1.0)
    assert (process.starts, shared.lives) == (3, 2)


async def test_a_replacement_that_is_lost_too_is_told_to_all_and_tried_again_by_all_together() -> None:
    process = Process()
    process.fails = 1
    shared = SharedProcess(cast(Any, process))
    ends = [shared.of_run(run) for run in (0, 1)]
    lost = await asyncio.gather(*(end.revive(1.0) for end in ends), return_exceptions=True)
    assert [str(one) for one in lost] == ["lost again"] * 2
    await asyncio.gather(*(end.revive(1.0) for end in ends))
    assert (process.starts, shared.lives) == (3, 1)


async def test_a_replacement_goes_on_though_the_run_that_began_it_ends() -> None:
    process = Process()
    shared = SharedProcess(cast(Any, process))
    first, second = shared.of_run(0), shared.of_run(1)
    begun = asyncio.create_task(first.revive(1.0))
    await asyncio.sleep(0)
    begun.cancel()
    await second.revive(1.0)
    assert (process.starts, shared.lives) == (2, 1)
