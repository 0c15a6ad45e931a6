"""What runs inside a worker process. Only plain values cross back: a judge's own exception may not unpickle."""

import ctypes
import os
import pickle
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

from rewards.base import Reward, RewardLoadError
from rewards.call import Group, Verdict, judge
from rewards.loader import BUILT_INS, load

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_JUDGES: dict[str, Reward] = {}  # of this process: one worker serves many groups


def confine(memory_bytes: int, parent: int) -> None:
    """Runs first in every worker: its limits, and its end when the process `parent` ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the driver, which then stops us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a loop inside C code too, where no Python handler would run
    os.setpgrp()  # what a judge starts is in our group, and is swept away with it
    _cap(resource.RLIMIT_AS, memory_bytes)
    _cap(resource.RLIMIT_CORE, 0)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        # Thread pools reserve address space per core: on a large host numpy alone would meet the memory cap.
        os.environ.setdefault(name, "1")
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before prctl could say so
        os._exit(1)


def _cap(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (limit, limit))


def prepare(use: str) -> tuple[int, str]:
    """Loads the judge once per process. Returns our process id, and what was wrong ('' if nothing)."""
    try:
        _judge(use)
    except RewardLoadError as error:
        return os.getpid(), str(error)
    return os.getpid(), ""


def score(use: str, args: Mapping[str, Any], group: bytes) -> Verdict:
    """Judges a pickled Group, unpickled here so that a failure to unpickle is an exception and not a dead pipe."""
    unpickled: Group = pickle.loads(group)
    return judge(_judge(use), unpickled, args, built_in=use in BUILT_INS)


def _judge(use: str) -> Reward:
    if use not in _JUDGES:
        _JUDGES[use] = load(use)
    return _JUDGES[use]
