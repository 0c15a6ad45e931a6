"""One worker process of a reward pool: Slot sends it messages of calls, each message under a deadline, and replaces it
when it dies, hangs or leaks. The first half of the module runs in the worker, the second half beside the pool.

Each Slot is a pebble pool of one process. pebble declares a whole pool broken when an idle worker dies (for example by
the kernel's out-of-memory killer), so a pool of several processes would lose them all.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pebble import ProcessExpired, ProcessPool

from cluster.actor import within
from cluster.child import end_with_parent
from cluster.confinement import limit
from cluster.errors import WrongInput
from cluster.machine import MARK, orphans, sweep
from rewards import call, limits
from rewards.base import Reward
from rewards.call import Verdict, failed
from rewards.code import process
from rewards.loader import BUILT_INS, load

# Code that runs in the worker. It returns plain values only: the exception class of a user may not unpickle elsewhere.

_LOADED: dict[str, Reward] = {}  # by `use`: a worker loads each function once


PID_DIGITS, LONGEST = 10, 32  # characters of the process id at the end of a mark, and of the whole mark
_CHECK_S = 1.0  # between two readings of the worker's memory, files and threads


def start(memory_bytes: int, parent: int, mark: str, printed: str | None) -> None:
    """Runs first in every worker. parent: the process of the Slot. mark: the beginning of the mark (cluster.machine) by
    which the Slot finds what the reward functions have started, once this worker has ended. printed: the file for the
    output of the functions (rewards.limits.redirect_output)."""
    limits.redirect_output(printed)
    confine(memory_bytes, parent)
    limits.overwrite(MARK, f"{mark}{os.getpid():0{PID_DIGITS}}")


def confine(memory_bytes: int, parent: int) -> None:
    """Sets the environment and limits of this process, and makes it end when the process `parent` ends."""
    limits.withhold()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver handles Ctrl-C and then ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a loop inside C code too, where no Python handler would run
    os.setpgrp()  # processes that a reward function starts join this group, and are killed with it
    _may_start_processes()
    limits.cap_memory(memory_bytes)
    limit(resource.RLIMIT_CORE, 0)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        # Several workers compute at the same time: with a thread pool in each they would compete for the cores.
        os.environ.setdefault(name, "1")
    if not end_with_parent(parent):
        os._exit(1)


def _may_start_processes() -> None:
    """Allows reward functions to use multiprocessing, which forbids it to daemons such as this process. Its processes
    are forked, since a fresh interpreter does not know the module that a user's file was loaded as (rewards.loader),
    nor the main module (rollout.env.preload)."""
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method("fork", force=True)


def prepare(use: str, args: Mapping[str, Any], env: Mapping[str, str]) -> tuple[int, str]:
    """Loads the reward function, unless this process has loaded it already, and the model of a built-in. Returns the
    process id, and what was wrong ('' if nothing)."""
    try:
        with limits.lent(env):
            reward = _loaded(use)
            if use in BUILT_INS and "model" in args and (own := getattr(reward, "prepare", None)) is not None:
                own(**args)
    except WrongInput as error:
        return os.getpid(), str(error)
    except Exception as error:
        if not limits.memory_met(error):
            raise
        return os.getpid(), f"its model does not fit: {limits.memory_advice()}"
    return os.getpid(), ""


def score(
    use: str, args: Mapping[str, Any], env: Mapping[str, str], group: bytes, timeout_s: float | None = None
) -> call.Verdict:
    """Scores a pickled Group. It is unpickled here, so that a failure to unpickle is an exception and does not break
    pebble's pipe. timeout_s: the Slot kills this process after so many seconds."""
    with limits.answering(timeout_s):
        return scores([(use, args, env, group)], None)[0]


def scores(
    asked: Sequence[tuple[str, Mapping[str, Any], Mapping[str, str], bytes]], timeout_s: float | None
) -> list[call.Verdict]:
    """Makes the calls of one message, each (use, args, env, pickled group), and returns their verdicts in order.
    Adjacent calls of one asynchronous function run at the same time, each within timeout_s."""
    found = []
    with limits.answering(timeout_s):
        for (use, args, env), together in groupby(asked, key=lambda one: one[:3]):
            groups: list[call.Group] = [pickle.loads(group) for *_, group in together]
            with limits.lent(env):
                reward = _loaded(use)
                found += call.scores(reward, groups, args, built_in=use in BUILT_INS, timeout_s=timeout_s)
    return _HELD.told(found)


class _Held:
    """Watches whether this process leaks memory, files or threads, so that the Slot can replace it."""

    def __init__(self) -> None:
        self._begun: limits.Usage | None = None  # after the first message without a failure for lack of memory
        self._looked = 0.0

    def told(self, verdicts: list[call.Verdict]) -> list[call.Verdict]:
        """Returns the verdicts of one message with `spent` set where a leak caused the failure. If there is a leak and
        no such failure, the last verdict is marked; without a leak none is."""
        failed = any(verdict.spent for verdict in verdicts)
        if failed or time.monotonic() - self._looked >= _CHECK_S:
            self._looked = time.monotonic()
            if self._leaks(failed):
                return verdicts if failed else [*verdicts[:-1], replace(verdicts[-1], spent=True)]
        return [replace(verdict, spent=False) if verdict.spent else verdict for verdict in verdicts]

    def _leaks(self, failed: bool) -> bool:
        """failed: a call of this message lacked memory, files or threads. If the process uses little all the same, that
        call alone wanted too much, and nothing leaks."""
        try:
            now = limits.memory_usage()
        except OSError:  # the process cannot open another file
            return self._begun is not None
        if self._begun is None:
            self._begun = None if failed else now
            return False
        return now.leaks(self._begun, near=0.5 if failed else 0.9)


_HELD = _Held()


def _loaded(use: str) -> Reward:
    if use not in _LOADED:
        _LOADED[use] = load(use)
    return _LOADED[use]


log = logging.getLogger("rewards")

T = TypeVar("T")
_HINTS = {
    signal.SIGKILL: "; the kernel kills so when the machine is out of memory",
    signal.SIGABRT: "; libraries abort so when they get no memory, and rollout.process_memory is the cap",
}
TOLD_S = 1.0  # a message of several calls gets this beyond timeout_s, to report which of them were late
SWEEP_S = 1.0  # for the processes that a dead worker has started to end
START_S = 60.0  # for a process to start, and again for a reward function to load


@dataclass(frozen=True)
class Call:
    """One configured reward function, as a worker loads and calls it: `use`, `args` and `timeout_s` of the
    configuration (rewards.config)."""

    use: str
    args: Mapping[str, Any]
    env: Mapping[str, str]
    """The environment variables that the reward names, with their values."""
    timeout_s: float


class ScoreCall(NamedTuple):
    """One call in a message: the reward function and a pickled group of `size` completions."""

    call: Call
    group: bytes
    size: int


class Slot:
    """One worker process, which is replaced whenever it dies. Used by one caller at a time."""

    def __init__(self, memory_bytes: int, starter: ThreadPoolExecutor, printed: Path | None = None) -> None:
        """starter: its thread starts the processes and must live as long as the Slot, since the kernel sends PDEATHSIG
        when the *thread* that started a process ends. memory_bytes, printed: see RewardPool."""
        self._memory_bytes, self._printed = memory_bytes, printed
        self._starter = starter
        self._closed = False
        self._running: Future[Any] | None = None
        self._pid: int | None = None
        self._loaded: list[Call] = []  # what the process _pid has loaded
        self._mark = uuid.uuid4().hex[: LONGEST - PID_DIGITS]  # the beginning of the mark of each worker of this Slot
        os.environ.setdefault(MARK, "0" * LONGEST)  # a worker overwrites this value, of the same length, by its mark
        self._pool = self._start()

    def _start(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=1,
            initializer=start,
            initargs=(self._memory_bytes, os.getpid(), self._mark, self._printed and str(self._printed)),
            context=multiprocessing.get_context("spawn"),
        )
        self._starter.submit(lambda: pool.active).result()  # reading `active` starts a new pool
        return pool

    def preload(self, call: Call) -> None:
        """Makes the worker load a reward function in the background. A failure is reported by the first `scores`."""
        self._pool.schedule(prepare, args=(call.use, call.args, call.env), timeout=START_S)

    async def scores(self, asked: Sequence[ScoreCall]) -> list[Verdict] | None:
        """Sends these calls in one message and returns their verdicts. Several calls must have one timeout_s, the
        deadline of the message. None if a message of several fails, whichever call is the cause: the caller then asks
        for each call by itself. An asynchronous call that was cancelled as late has the status timeout, and its process
        lives on."""
        if len(asked) == 1:
            verdict = await self._score(*asked[0])
            if verdict.spent:
                await self._replace()
            return [verdict]
        tasks = [(one.call.use, one.call.args, one.call.env, one.group) for one in asked]
        try:
            for one in asked:
                if one.call not in self._loaded and await self._prepare(one.call):
                    return None
            timeout_s = asked[0].call.timeout_s
            verdicts = await self._run(scores, (tasks, timeout_s), timeout_s + TOLD_S)
            if verdicts is None:
                return None
            if not any(verdict.spent for verdict in verdicts):
                return verdicts
            await self._replace()
            return None if any(verdict.spent and verdict.status == "error" for verdict in verdicts) else verdicts
        except (TimeoutError, ProcessExpired, BrokenProcessPool):
            self._sweep()
        except Exception as error:
            log.debug("a message of %d calls failed, each is made by itself: %s", len(asked), error)
        return None

    async def _score(self, call: Call, group: bytes, size: int) -> Verdict:
        """Scores one group within `call.timeout_s` seconds, without the time for loading."""
        death = ""
        for _ in range(2):  # the worker may have died while idle, which is no fault of this reward function
            if call not in self._loaded and (problem := await self._prepare(call)):
                return failed("error", size, problem)
            try:
                verdict = await self._answer(call, group, size)
                if not verdict.spent or verdict.status != "error":
                    return verdict
                await self._replace()  # earlier calls have leaked what this call lacked
            except BrokenProcessPool as error:
                self._sweep()
                death = _death(error)
        return failed("error", size, f"its process died: {death}") if death else verdict

    async def _replace(self) -> None:
        """Replaces the worker by a fresh process, which loads the same functions."""
        calls = list(self._loaded)
        log.warning("a reward process has no memory, files or threads left, or soon will not; a fresh one replaces it")
        await asyncio.to_thread(self._restart)
        for loaded in calls:
            self.preload(loaded)

    async def _answer(self, call: Call, group: bytes, size: int) -> Verdict:
        """Scores one group in a worker that has loaded the function. Raises BrokenProcessPool if the worker ended
        before pebble had noted that it took the task."""
        try:
            verdict = await self._run(score, (call.use, call.args, call.env, group, call.timeout_s), call.timeout_s)
        except TimeoutError:
            self._sweep()
            return failed("timeout", size, f"no answer within {call.timeout_s:g} s, so its process was killed")
        except ProcessExpired as error:
            self._sweep()
            return failed("error", size, f"its process died: {_death(error)}")
        return failed("error", size, "the reward pool was closed before it answered") if verdict is None else verdict

    async def _prepare(self, call: Call) -> str:
        """Makes the worker, a fresh one if need be, load the function. Returns what went wrong, or ''."""
        death = ""
        for _ in range(2):  # the worker may have died while idle, which is no fault of this reward function
            if not self._closed and not self._pool.active:
                await asyncio.to_thread(self._restart)
            try:
                loaded = await self._run(prepare, (call.use, call.args, call.env), START_S)
            except TimeoutError:
                self._sweep()
                return f"did not load within {START_S:g} s; {_quicker(call.use)}"
            except (ProcessExpired, BrokenProcessPool) as error:
                self._sweep()
                death = f"its process died while loading: {_death(error)}"
                continue
            if loaded is None:
                return "the reward pool is closed"
            pid, problem = loaded
            if self._pid not in (None, pid):
                self._sweep()
            self._pid = pid
            if not problem:
                self._loaded.append(call)
            return problem
        return death

    async def _run(self, function: Callable[..., T], args: tuple[Any, ...], timeout_s: float) -> T | None:
        """Calls a function in the worker; None if the Slot was closed. Raises TimeoutError, ProcessExpired or
        BrokenProcessPool. Cancelling this kills the worker."""
        if self._closed:
            return None
        try:
            self._running = self._pool.schedule(function, args=args, timeout=timeout_s)
        except RuntimeError as error:  # the pool is broken
            raise BrokenProcessPool(str(error)) from error
        waiting = asyncio.wrap_future(self._running)
        try:
            # pebble's clock starts when the worker takes the task; this one also ends the wait for a worker that never
            # takes it.
            async with within(timeout_s + START_S) as limit:
                await asyncio.wait([waiting])
            # close() ends a task in one of two ways: the future is cancelled, or pebble sets an exception.
            if waiting.cancelled() or (self._closed and waiting.exception() is not None):
                return None
            answer: T = waiting.result()
            return answer
        except TimeoutError:
            if limit.expired():
                await asyncio.to_thread(self._restart)
            elif limit.stood_still():  # pebble counts wall-clock time, also while this process was stopped
                raise BrokenProcessPool("its time was over while this process stood still") from None
            raise
        except asyncio.CancelledError:
            self._loaded.clear()  # pebble kills the process
            raise
        finally:
            waiting.cancel()

    def _restart(self) -> None:
        _stop(self._pool)
        self._sweep()
        if not self._closed:
            self._pool = self._start()

    def _sweep(self) -> None:
        """Kills what the dead worker's reward functions have started, in any session, and removes the folders of code
        that it ran."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):  # no process of the group is left
                os.killpg(self._pid, signal.SIGKILL)
        sweep(partial(orphans, self._mark), SWEEP_S)
        process.sweep()
        self._pid = None
        self._loaded.clear()

    def close(self) -> None:
        """Kills the worker, also a busy one, whose call then fails. Blocks for about 0.2 s."""
        self._closed = True
        _stop(self._pool)
        self._sweep()
        if self._running is not None:
            self._running.cancel()


def _stop(pool: ProcessPool) -> None:
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()


def _quicker(use: str) -> str:
    if use in BUILT_INS:
        return "download its model before the run, or give a smaller one"
    return "move slow work out of the top level of its module"


def _death(error: ProcessExpired | BrokenProcessPool) -> str:
    code = getattr(error, "exitcode", None)
    if code is None:  # the worker died before pebble had noted that it took the task
        return "it ended too soon for its exit code to be seen"
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}{_HINTS.get(-code, '')}"
