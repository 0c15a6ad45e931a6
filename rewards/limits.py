"""What a reward process may see, hold and take: variables, memory, deadlines; and where its output goes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import re
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cluster.confinement import limit
from cluster.errors import WrongInput
from rewards.base import said

# The environment of a reward process: what programs need to run, and no tokens but those that a reward names.
#
# A reward process serves all reward functions of a run, calls of one at a time. A variable that one of them names is
# set during the calls of that one only.

# What somebody's code raised, in one line.

LONGEST = 500  # characters of an exception's text that are worth carrying


class Settings(NamedTuple):
    """What a user may change: who is kept from variables, and how they get {names}."""

    variables: str


OF_REWARDS = Settings("reward functions: name it with this reward, env: [{names}]")
OF_ENVIRONMENTS = Settings("environments: name it, env.variables=[{names}]")


def described(error: BaseException, settings: Settings = OF_REWARDS, *, caller: str = "") -> str:
    """`ValueError: boom (my_rewards.py, line 3)`: where it was raised, and what to do where that is known.

    Args:
        caller: the file that called the code, whose own lines say nothing of it.
    """
    text = said(error)[:LONGEST]
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError):  # its text ends with file and line
        return told
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != caller and not frame.filename.startswith("<frozen")
    ]
    if frames:
        told += f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    if memory_met(error):
        return f"{told}: {memory_advice()}"
    return told + advice(text, settings.variables)


DEVICE = "GLEANER_REWARD_DEVICE"  # set where reward processes have a card of their own; else built-ins take none
# Where things are, how text is written, how many threads and which devices. Proxies are left out: their addresses
# often hold a password.
# fmt: off
ALLOWED = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "TMPDIR", "VIRTUAL_ENV",
    "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE",
    "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR", "NLTK_DATA", "TOKENIZERS_PARALLELISM", "GLEANER_MARK", DEVICE,
})
# fmt: on
ALLOWED_BEGINNINGS = ("LC_", "XDG_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "NVIDIA_")

# Ends of the names by which clients find whom they ask, and who asks.
_OF_CLIENTS = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|URL|ENDPOINT|HOST|BASE|PROXY|ORGANIZATION|PROJECT|REGION)$")
_withheld: set[str] = set()  # names, in a reward process
_asked: Counter[str] = Counter()  # of these the ones that were looked for, and how often


class _Watched(os._Environ[str]):
    """os.environ, which notes what is looked for and withheld."""

    def __getitem__(self, key: str) -> str:
        try:
            return super().__getitem__(key)
        except KeyError:
            if key in _withheld and _OF_CLIENTS.search(key.upper()):
                _asked[key] += 1
            raise


def values_of(names: Sequence[str], label: str) -> dict[str, str]:
    """The variables that a reward names, as they are here. Raises WrongInput if one is not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise WrongInput(
            f"{label}: env: must name variables that are set where rewards run, and {', '.join(missing)} is not; "
            "export it before the run, or take it out of env"
        )
    return {name: os.environ[name] for name in names}


def kept(name: str) -> bool:
    """Whether reward functions do not see a variable of this name, unless they name it."""
    return name not in ALLOWED and not name.startswith(ALLOWED_BEGINNINGS)


def withhold() -> None:
    """Takes from this process, and from what it will start, every variable that is not allowed."""
    names = [name for name in os.environ if kept(name)]
    _withheld.update(names)
    for name in names:
        del os.environ[name]
    _blank(names)
    os.environ.__class__ = _Watched


def asked() -> dict[str, int]:
    """Since the last call of this: the names of withheld variables that were looked for, of those by which a client
    finds whom it asks or says who asks, and how often."""
    found = dict(_asked)
    _asked.clear()
    return found


@contextlib.contextmanager
def lent(values: Mapping[str, str]) -> Iterator[None]:
    """Inside this block the variables that a reward names are in the environment."""
    here = dict(os.environ) if values else {}  # which no look of ours is counted in
    before = {name: here.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)


def advice(text: str, how: str) -> str:
    """If the text of an exception names variables that are kept from its process: `how` to get {names}; else ''."""
    words = set(re.findall(r"\w+", text))
    missed = sorted(name for name in _withheld & words - set(os.environ) if "_" in name)
    if not missed:
        return ""
    listed = ", ".join(missed)
    return f"; {listed} is kept from {how.format(names=listed)}"


def overwrite(name: str, value: str) -> None:
    """Sets a variable, also in the block that this process was started with, which /proc/<pid>/environ shows of it and
    of its forks, where it has one of the same length there."""
    os.environ[name] = value
    for place, entry in _started_with():
        if entry.startswith(f"{name}=".encode()) and len(entry) == len(f"{name}={value}".encode()):
            ctypes.memmove(place, f"{name}={value}".encode(), len(entry))


def _blank(names: Sequence[str]) -> None:
    """Overwrites variables in the block that the process was started with, which /proc/<pid>/environ shows for ever.

    They must have been removed: nothing points there any more.
    """
    prefixes = tuple(name.encode() + b"=" for name in names)
    for place, entry in _started_with():
        if entry.startswith(prefixes):
            ctypes.memset(place, 0, len(entry))


def _started_with() -> Iterator[tuple[int, bytes]]:
    """The variables that this process was started with, and where each lies."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end, proc(5); the command's name may hold spaces
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        yield start, entry
        start += len(entry) + 1


# What a reward process may hold: its memory cap, what is said of a function that met it, and what has leaked.


DEFAULT_MEMORY = (
    4 << 30
)  # bytes: torch and a reward model of a billion parameters in 16 bits, or any number of checkers
GIB = 1 << 30
_CAUSES = 10  # of an exception that are looked at
_THREADS = 1000  # that a function may have: no limit of the kernel says so
# What other languages say in place of a MemoryError.
_SAID = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "unable to allocate")


def cap_memory(memory_bytes: int) -> None:
    """Limits the memory that this process, and each that it starts, can write to.

    Not its address space, which CUDA, torch and thread pools reserve by tens of GB and never fill.
    """
    limit(resource.RLIMIT_DATA, memory_bytes)


def memory_met(error: BaseException) -> bool:
    """True if `error` says that main memory ran out (a GPU's memory has no cap here)."""
    if isinstance(error, MemoryError):
        return True
    try:
        text = str(error).lower()
    except BaseException:  # whatever the __str__ of somebody's exception does
        return False
    return "cuda" not in text and any(words in text for words in _SAID)


def memory_spent(error: BaseException) -> bool:
    """True if it says that the process had no memory, files or threads left, which other calls may have taken."""
    told: BaseException | None = error
    for _ in range(_CAUSES):
        if told is None:
            return False
        if memory_met(told) or (isinstance(told, OSError) and told.errno in (errno.EMFILE, errno.ENOMEM)):
            return True
        if isinstance(told, RuntimeError) and "can't start new thread" in str(told):
            return True
        told = told.__cause__ or told.__context__
    return False


class Usage(NamedTuple):
    """Of this process: bytes that RLIMIT_DATA counts, open files, threads."""

    memory: int
    files: int
    threads: int

    def leaks(self, begun: Usage, near: float = 0.9) -> bool:
        """Whether so much of a limit is taken, much of it since the beginning."""
        most = resource.getrlimit(resource.RLIMIT_DATA)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0], _THREADS
        return any(
            limit != resource.RLIM_INFINITY and now > near * limit and now - first > near / 2 * (limit - first)
            for now, first, limit in zip(self, begun, most, strict=True)
        )


def memory_usage() -> Usage:
    """As it is now: proc(5), statm and stat."""
    threads = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[17])
    return Usage(memory_held(), len(os.listdir("/proc/self/fd")), threads)


def memory_held() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def memory_advice() -> str:
    """The cap of this process, which it met, and what to set instead."""
    bytes_ = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if bytes_ == resource.RLIM_INFINITY:
        return "the machine has no more memory"
    return (
        f"its process may hold {bytes_ / GIB:g} GiB: raise rollout.process_memory, for example to "
        f"{2 * bytes_ / GIB:g}GiB, or let the function need less"
    )


# What reward functions print goes to no standard output of ours, which may be JSON, and does not flood a console.

NAME = "reward_output.log"  # in a run's folder


def redirect_output(file: str | None) -> None:
    """Standard output and error of this process and its children go to the end of that file (None: output to where
    errors go)."""
    descriptor = 2
    if file is not None:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError:  # no folder on this node, or a full disk: what is printed is no reason to end a run
            file = None
    os.dup2(descriptor, 1)
    if file is not None:
        os.dup2(descriptor, 2)
        os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):  # None, where it was closed
        sys.stdout.reconfigure(line_buffering=True)  # a process that is killed would take what it holds along


# A deadline for what a function of ours does with one completion, so that it costs no other its reward.

_PATIENT, _HURRIED = 2, 1 / 8
_OF_THE_REST = 1 / 4  # of the time that a call has left, for one completion
_OF_OTHERS, _OF_THE_LAST = 1 / 2, 9 / 10  # the same, where a function of the user's has one completion a call
_LEAST_S = 0.01
_ends: list[float] = []  # of time.monotonic, by when the call that this process answers must be over


class Late(BaseException):
    """It took too long: whoever set the time says so of that completion; a BaseException, since libraries catch
    exceptions of what they do not understand."""


@contextmanager
def answering(seconds: float | None) -> Iterator[None]:
    """A call that must be over in so many seconds by the clock on the wall (None: whenever it is): `computing` inside
    leaves others their part of them."""
    if seconds is not None:
        _ends.append(time.monotonic() + seconds)
    try:
        yield
    finally:
        if seconds is not None:
            _ends.pop()


@contextmanager
def within(seconds: float, error: type[BaseException] = Late, again_s: float | None = None) -> Iterator[None]:
    """Raises `error` inside, after `seconds` and again after each `again_s` (None: seconds), since code may catch it.

    By SIGALRM: what computes in C without asking for signals is not interrupted (regular expressions are). Without a
    limit in any thread but the main one, which is where reward processes call their functions.
    """
    with _alarms({signal.ITIMER_REAL: (seconds, again_s or seconds)}, error):
        yield


@contextmanager
def computing(seconds: float, error: type[BaseException] = Late) -> Iterator[None]:
    """As `within`, but of this process's CPU time: a busy machine makes nothing late that only computes. On the wall a
    quarter of what its call has left, so that however many are late, and on whatever machine, the call is not."""
    timers = {signal.ITIMER_PROF: (seconds, seconds)}
    if _ends:
        rest = max(_LEAST_S, (_ends[-1] - time.monotonic()) * _OF_THE_REST)
        timers[signal.ITIMER_REAL] = rest, rest
    with _alarms(timers, error):
        yield


@contextmanager
def sharing(last: bool, error: type[BaseException] = Late) -> Iterator[None]:
    """Of the time that its call has left, half for this completion, so that of several that take equally long none is
    late; nine tenths for the last of a group. No limit where somebody else's code has a handler of its own for SIGALRM:
    by it that limits itself."""
    if not _ends or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return
    rest = max(_LEAST_S, (_ends[-1] - time.monotonic()) * (_OF_THE_LAST if last else _OF_OTHERS))
    with _alarms({signal.ITIMER_REAL: (rest, rest)}, error):
        yield


@contextmanager
def _alarms(timers: dict[int, tuple[float, float]], error: type[BaseException]) -> Iterator[None]:
    """timers: seconds to the first alarm of each, and between others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    over = False

    def late(_number: int, _frame: object) -> None:
        if not over:
            raise error

    signals = {signal.ITIMER_REAL: signal.SIGALRM, signal.ITIMER_PROF: signal.SIGPROF}
    before = {timer: signal.signal(signals[timer], late) for timer in timers}
    try:
        for timer, (first, others) in timers.items():
            signal.setitimer(timer, first, others)
        yield
    finally:
        over = True  # before the timers are stopped: a busy machine may have had the next alarm by now
        for timer, handler in before.items():
            signal.setitimer(timer, 0)
            if signal.getsignal(signals[timer]) is late:  # not a module's own, which it set as it was imported in here
                signal.signal(signals[timer], handler)


class Patience:
    """Of a group: each completion may compute for `seconds`; once two were late, the others an eighth of it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.late = 0

    @property
    def seconds(self) -> float:
        """For the next one."""
        return self._seconds * (_HURRIED if self.late >= _PATIENT else 1.0)

    @contextmanager
    def with_one(self) -> Iterator[None]:
        """Raises Late inside once its time is over, and counts that."""
        try:
            with computing(self.seconds):
                yield
        except Late:
            self.late += 1
            raise
