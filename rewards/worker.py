"""What runs inside a reward process. Only plain values go back: a user's own exception class may not unpickle there."""

import multiprocessing
import os
import pickle
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from cluster.child import end_with_parent
from cluster.confinement import limit
from cluster.machine import MARK
from rewards import (
    call,
    environment,
    limits,
)
from rewards.base import Reward, RewardError
from rewards.loader import BUILT_INS, load

_LOADED: dict[str, Reward] = {}  # of this process: one worker serves many groups


PID_DIGITS, LONGEST = 10, 32  # characters of a mark: of its last part, and in all
_CHECK_S = 1.0  # between looks at what the process holds


def start(memory_bytes: int, parent: int, mark: str, printed: str | None) -> None:
    """Runs first in every worker, for the slot that has it, which finds by `mark` what the functions have started, once
    this process is no more. printed: the file for what they print (rewards.limits.redirect)."""
    limits.redirect_output(printed)
    confine(memory_bytes, parent)
    environment.overwrite(MARK, f"{mark}{os.getpid():0{PID_DIGITS}}")


def confine(memory_bytes: int, parent: int) -> None:
    """Sets the environment and limits of this process, and makes it end when the process `parent` ends."""
    environment.withhold()
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
        with environment.lent(env):
            reward = _loaded(use)
            if use in BUILT_INS and "model" in args and (own := getattr(reward, "prepare", None)) is not None:
                own(**args)
    except RewardError as error:
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
            with environment.lent(env):
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
