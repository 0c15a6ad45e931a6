"""One worker process that scores the groups of one message after the other, each message under a deadline; the first
half is what runs in it.

Each slot is a pebble pool of its own, of one process: pebble declares a whole pool broken when an idle worker dies
(the kernel's out-of-memory killer, say), and here that costs one slot, which is made anew.
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

# What runs inside a reward process. Only plain values go back: a user's own exception class may not unpickle there.

_LOADED: dict[str, Reward] = {}  # of this process: one worker serves many groups


PID_DIGITS, LONGEST = 10, 32  # characters of a mark: of its last part, and in all
_CHECK_S = 1.0  # between looks at what the process holds


def start(memory_bytes: int, parent: int, mark: str, printed: str | None) -> None:
    """Runs first in every worker, for the slot that has it, which finds by `mark` what the functions have started, once
    this process is no more. printed: the file for what they print (rewards.limits.redirect)."""
    limits.redirect_output(printed)
    confine(memory_bytes, parent)
    limits.overwrite(MARK, f"{mark}{os.getpid():0{PID_DIGITS}}")


def confine(memory_bytes: int, parent: int) -> None:
    """Sets the environment and limits of this process, and makes it end when the process `parent` ends."""
    limits.withhold()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the driver, which then stops us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a loop inside C code too, where no Python handler would run
    os.setpgrp()  # what a reward function starts is in our group, and is swept away with it
    _may_start_processes()
    limits.cap_memory(memory_bytes)
    limit(resource.RLIMIT_CORE, 0)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        # Rewards of several processes at once: a thread pool in each would have them wait for one another.
        os.environ.setdefault(name, "1")
    if not end_with_parent(parent):
        os._exit(1)


def _may_start_processes() -> None:
    """Of multiprocessing: to it we are a daemon, which may not. By a fork, since a fresh interpreter does not know the
    module that a user's file was loaded as (rewards.loader), nor the main module (rollout.env.preload)."""
    multiprocessing.current_process().daemon = False
    multiprocessing.set_start_method("fork", force=True)


def prepare(use: str, args: Mapping[str, Any], env: Mapping[str, str]) -> tuple[int, str]:
    """Loads the reward function once per process, and a built-in's model. Returns our process id, and what was wrong
    ('' if nothing)."""
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
    """Scores a pickled Group, unpickled here so that a failure to unpickle is an exception and not a dead pipe.
    timeout_s: after which this process is ended."""
    with limits.answering(timeout_s):
        return scores([(use, args, env, group)], None)[0]


def scores(
    asked: Sequence[tuple[str, Mapping[str, Any], Mapping[str, str], bytes]], timeout_s: float | None
) -> list[call.Verdict]:
    """What `score` says of each, in order. Calls of one asynchronous function that stand together are made at once,
    each within timeout_s."""
    found = []
    with limits.answering(timeout_s):
        for (use, args, env), together in groupby(asked, key=lambda one: one[:3]):
            groups: list[call.Group] = [pickle.loads(group) for *_, group in together]
            with limits.lent(env):
                reward = _loaded(use)
                found += call.scores(reward, groups, args, built_in=use in BUILT_INS, timeout_s=timeout_s)
    return _HELD.told(found)


class _Held:
    """What this process holds: whether it is leaking, so that a fresh one had better take its place."""

    def __init__(self) -> None:
        self._begun: limits.Usage | None = None  # after the first message that it answered
        self._looked = 0.0

    def told(self, verdicts: list[call.Verdict]) -> list[call.Verdict]:
        """The verdicts of one message: `spent` where a leak is to blame, and the last one where there is a leak."""
        failed = any(verdict.spent for verdict in verdicts)
        if failed or time.monotonic() - self._looked >= _CHECK_S:
            self._looked = time.monotonic()
            if self._leaks(failed):
                return verdicts if failed else [*verdicts[:-1], replace(verdicts[-1], spent=True)]
        return [replace(verdict, spent=False) if verdict.spent else verdict for verdict in verdicts]

    def _leaks(self, failed: bool) -> bool:
        """failed: something had no room just now; where little is taken it was one call alone that wanted too much."""
        try:
            now = limits.memory_usage()
        except OSError:  # no file is left to look with
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
TOLD_S = 1.0  # for a message to tell which of its calls were late
SWEEP_S = 1.0  # for what it has started to end
START_S = 60.0  # for a process to start, and again for a reward function to load


@dataclass(frozen=True)
class Call:
    """One reward as a worker is asked for it."""

    use: str
    args: Mapping[str, Any]
    env: Mapping[str, str]
    """The environment variables that the reward names, with their values."""
    timeout_s: float


class ScoreCall(NamedTuple):
    """What a worker is asked: a call on a pickled group of `size` samples."""

    call: Call
    group: bytes
    size: int


class Slot:
    """One worker process, replaced whenever it dies. Used by one caller at a time."""

    def __init__(self, memory_bytes: int, starter: ThreadPoolExecutor, printed: Path | None = None) -> None:
        """`starter`: starts the processes; its thread must live as long as the slot. When the *thread* that started a
        process ends, the kernel takes that for the end of the parent, and PDEATHSIG would kill the worker. printed:
        as of RewardPool."""
        self._memory_bytes, self._printed = memory_bytes, printed
        self._starter = starter
        self._closed = False
        self._running: Future[Any] | None = None
        self._pid: int | None = None
        self._loaded: list[Call] = []  # by the process of that pid
        self._mark = uuid.uuid4().hex[: LONGEST - PID_DIGITS]  # of all that its processes start, before their number
        os.environ.setdefault(MARK, "0" * LONGEST)  # in whose place a process writes its own (start)
        self._pool = self._start()

    def _start(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=1,
            initializer=start,
            initargs=(self._memory_bytes, os.getpid(), self._mark, self._printed and str(self._printed)),
            context=multiprocessing.get_context("spawn"),
        )
        self._starter.submit(lambda: pool.active).result()  # asking a new pool whether it is active starts it
        return pool

    def preload(self, call: Call) -> None:
        """Has the worker load it in the background. What goes wrong is said when it is first asked to score."""
        self._pool.schedule(prepare, args=(call.use, call.args, call.env), timeout=START_S)

    async def scores(self, asked: Sequence[ScoreCall]) -> list[Verdict] | None:
        """The verdicts of these calls. Several of them are expected to be quick, or to wait at once. They have one
        message and its deadline: None if that fails, whichever of them is to blame. Each is then told when it is asked
        for by itself. One that was cancelled as late has the status timeout, and its process lives on."""
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
        """Within `call.timeout_s` seconds; loading is not charged."""
        death = ""
        for _ in range(2):  # a worker that died while idle is found dead here; that is no fault of this reward function
            if call not in self._loaded and (problem := await self._prepare(call)):
                return failed("error", size, problem)
            try:
                verdict = await self._answer(call, group, size)
                if not verdict.spent or verdict.status != "error":
                    return verdict
                await self._replace()  # what this call lacked, others before it have taken
            except BrokenProcessPool as error:
                self._sweep()
                death = _death(error)
        return failed("error", size, f"its process died: {death}") if death else verdict

    async def _replace(self) -> None:
        """By a fresh process, which loads what this one had."""
        calls = list(self._loaded)
        log.warning("a reward process has no memory, files or threads left, or soon will not; a fresh one replaces it")
        await asyncio.to_thread(self._restart)
        for loaded in calls:
            self.preload(loaded)

    async def _answer(self, call: Call, group: bytes, size: int) -> Verdict:
        """Of a process that has loaded the reward. Raises BrokenProcessPool where that ended before pebble had noted
        that it took the task."""
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
        """Brings up a worker that has loaded the reward. Returns what went wrong, or ''."""
        death = ""
        for _ in range(2):  # a worker that died while idle is found dead here; that is no fault of this reward function
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
        """None: it was closed. Raises TimeoutError, ProcessExpired or BrokenProcessPool. Cancelling it kills the
        worker's task."""
        if self._closed:
            return None
        try:
            self._running = self._pool.schedule(function, args=args, timeout=timeout_s)
        except RuntimeError as error:  # the pool is broken
            raise BrokenProcessPool(str(error)) from error
        waiting = asyncio.wrap_future(self._running)
        try:
            # pebble's clock starts when the worker takes the task; ours also sees a worker that never does.
            async with within(timeout_s + START_S) as limit:
                await asyncio.wait([waiting])
            # close() cancels what pebble leaves unanswered; what pebble breaks off is answered with an exception.
            if waiting.cancelled() or (self._closed and waiting.exception() is not None):
                return None
            answer: T = waiting.result()
            return answer
        except TimeoutError:
            if limit.expired():
                await asyncio.to_thread(self._restart)
            elif limit.stood_still():  # and pebble's clock, that on the wall, went on
                raise BrokenProcessPool("its time was over while this process stood still") from None
            raise
        except asyncio.CancelledError:
            self._loaded.clear()  # pebble ends the process
            raise
        finally:
            waiting.cancel()

    def _restart(self) -> None:
        _stop(self._pool)
        self._sweep()
        if not self._closed:
            self._pool = self._start()

    def _sweep(self) -> None:
        """Kills what the dead worker's reward functions started and left behind, in whatever session, and wipes the
        folders of code that it ran."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):  # nothing was left
                os.killpg(self._pid, signal.SIGKILL)
        sweep(partial(orphans, self._mark), SWEEP_S)
        process.sweep()
        self._pid = None
        self._loaded.clear()

    def close(self) -> None:
        """Ends the worker whatever it is doing, and tells who waits for it. Blocks for about 0.2 s."""
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
    if code is None:  # it was dead before pebble had noted that it took the task
        return "it ended too soon for its exit code to be seen"
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}{_HINTS.get(-code, '')}"
