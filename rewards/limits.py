"""Limits of a reward process, applied inside it: the environment variables that it sees, its memory, where its output
goes, and the time that one completion may take. Processes of environments use parts of this too.
"""

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

# Exceptions of a user's code as text.

LONGEST = 500  # characters that are kept of an exception's text


class Settings(NamedTuple):
    """Text for a user's error messages. variables: from whom variables are withheld, and the setting by which they get
    {names}."""

    variables: str


OF_REWARDS = Settings("reward functions: name it with this reward, env: [{names}]")
OF_ENVIRONMENTS = Settings("environments: name it, env.variables=[{names}]")


def described(error: BaseException, settings: Settings = OF_REWARDS, *, caller: str = "") -> str:
    """An exception of a user's code on one line, `ValueError: boom (my_rewards.py, line 3)`, with advice if it is due
    to a limit of this module.

    Args:
        caller: the file that called the code; its lines are not reported as the place.
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


# The environment of a reward process: the variables that programs need to run, without secrets. A reward process serves
# all reward functions of a run, calls of one function at a time; a variable that a function's `env` names is set during
# its calls only.

DEVICE = "GLEANER_REWARD_DEVICE"  # set if reward processes have a GPU of their own; built-ins use none without it
# Variables for paths, languages, threads and devices. Proxies are not allowed, since their addresses often have a
# password.
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

# Ends of the names of variables from which clients take addresses and credentials.
_OF_CLIENTS = re.compile(r"(^|_)(KEY|TOKEN|SECRET|PASSWORD|URL|ENDPOINT|HOST|BASE|PROXY|ORGANIZATION|PROJECT|REGION)$")
_withheld: set[str] = set()  # names of the variables that `withhold` has removed from this process
_asked: Counter[str] = Counter()  # how often each withheld variable of _OF_CLIENTS was looked for


class _Watched(os._Environ[str]):
    """The class of os.environ after `withhold`; counts in _asked how often a withheld variable is looked for."""

    def __getitem__(self, key: str) -> str:
        try:
            return super().__getitem__(key)
        except KeyError:
            if key in _withheld and _OF_CLIENTS.search(key.upper()):
                _asked[key] += 1
            raise


def values_of(names: Sequence[str], label: str) -> dict[str, str]:
    """The values that these variables have in this process. Raises WrongInput, which begins with `label`, if one is
    not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise WrongInput(
            f"{label}: env: must name variables that are set where rewards run, and {', '.join(missing)} is not; "
            "export it before the run, or take it out of env"
        )
    return {name: os.environ[name] for name in names}


def kept(name: str) -> bool:
    """Whether a variable of this name is withheld from reward functions that do not name it in `env`."""
    return name not in ALLOWED and not name.startswith(ALLOWED_BEGINNINGS)


def withhold() -> None:
    """Removes every variable that is not allowed from the environment of this process and of its future children."""
    names = [name for name in os.environ if kept(name)]
    _withheld.update(names)
    for name in names:
        del os.environ[name]
    _blank(names)
    os.environ.__class__ = _Watched


def asked() -> dict[str, int]:
    """How often each withheld variable with an address or a credential was looked for since the last call of this."""
    found = dict(_asked)
    _asked.clear()
    return found


@contextlib.contextmanager
def lent(values: Mapping[str, str]) -> Iterator[None]:
    """Sets the variables of a reward's `env` inside this block."""
    here = dict(os.environ) if values else {}  # looking up names in a copy is not counted in _asked
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
    """Advice, made from the template `how`, if the text of an exception names withheld variables; else ''."""
    words = set(re.findall(r"\w+", text))
    missed = sorted(name for name in _withheld & words - set(os.environ) if "_" in name)
    if not missed:
        return ""
    listed = ", ".join(missed)
    return f"; {listed} is kept from {how.format(names=listed)}"


def overwrite(name: str, value: str) -> None:
    """Sets a variable. If this process was started with a value of the same length, that value is overwritten too, so
    that /proc/<pid>/environ of this process and of its forks shows the new one."""
    os.environ[name] = value
    for place, entry in _started_with():
        if entry.startswith(f"{name}=".encode()) and len(entry) == len(f"{name}={value}".encode()):
            ctypes.memmove(place, f"{name}={value}".encode(), len(entry))


def _blank(names: Sequence[str]) -> None:
    """Overwrites variables in the memory block that /proc/<pid>/environ shows, with which the process was started. They
    must have been removed from os.environ, so that nothing refers to the block.
    """
    prefixes = tuple(name.encode() + b"=" for name in names)
    for place, entry in _started_with():
        if entry.startswith(prefixes):
            ctypes.memset(place, 0, len(entry))


def _started_with() -> Iterator[tuple[int, bytes]]:
    """(address, b"NAME=value") of each variable that this process was started with."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # the command's name may have spaces
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end, proc(5)
    for entry in ctypes.string_at(start, end - start).split(b"\0"):
        yield start, entry
        start += len(entry) + 1


# The memory limit of a reward process, errors for lack of memory, and leaks.


DEFAULT_MEMORY = 4 << 30  # bytes: enough for torch and a reward model of a billion parameters in 16 bits
GIB = 1 << 30
_CAUSES = 10  # chained exceptions that memory_spent examines
_THREADS = 1000  # threads that count as the limit in Usage.leaks; the kernel has no such limit per process
# Messages of libraries in other languages, in place of a MemoryError.
_SAID = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "unable to allocate")


def cap_memory(memory_bytes: int) -> None:
    """Limits the writable memory of this process, and of each process that it starts (RLIMIT_DATA).

    The address space is not limited: CUDA, torch and thread pools reserve tens of GB that they never use.
    """
    limit(resource.RLIMIT_DATA, memory_bytes)


def memory_met(error: BaseException) -> bool:
    """Whether `error` says that main memory ran out. (Memory of a GPU is not limited here.)"""
    if isinstance(error, MemoryError):
        return True
    try:
        text = str(error).lower()
    except BaseException:  # the __str__ of a user's exception may raise anything
        return False
    return "cuda" not in text and any(words in text for words in _SAID)


def memory_spent(error: BaseException) -> bool:
    """Whether `error` or its causes say that the process had no memory, files or threads left. Earlier calls may have
    leaked them."""
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
    """What a process uses. memory: bytes that RLIMIT_DATA counts. files, threads: how many are open or running."""

    memory: int
    files: int
    threads: int

    def leaks(self, begun: Usage, near: float = 0.9) -> bool:
        """Whether this process uses more than the share `near` of a limit, and more than half that share of what was
        free at the beginning, when it used `begun`."""
        most = resource.getrlimit(resource.RLIMIT_DATA)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0], _THREADS
        return any(
            limit != resource.RLIM_INFINITY and now > near * limit and now - first > near / 2 * (limit - first)
            for now, first, limit in zip(self, begun, most, strict=True)
        )


def memory_usage() -> Usage:
    """What this process uses now, by statm and stat of proc(5)."""
    threads = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[17])
    return Usage(memory_held(), len(os.listdir("/proc/self/fd")), threads)


def memory_held() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def memory_advice() -> str:
    """Advice for a function that met the memory limit of this process: the limit, and what to set instead."""
    bytes_ = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if bytes_ == resource.RLIM_INFINITY:
        return "the machine has no more memory"
    return (
        f"its process may hold {bytes_ / GIB:g} GiB: raise rollout.process_memory, for example to "
        f"{2 * bytes_ / GIB:g}GiB, or let the function need less"
    )


# The output of reward functions. It must not mix with the standard output of a command, which may be JSON, nor fill the
# console.

NAME = "reward_output.log"  # in a run's folder


def redirect_output(file: str | None) -> None:
    """Appends standard output and error of this process and its children to that file. None, or a file that cannot be
    opened: standard output goes to standard error."""
    descriptor = 2
    if file is not None:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError:  # for example a folder that this node lacks, or a full disk; that must not end the run
            file = None
    os.dup2(descriptor, 1)
    if file is not None:
        os.dup2(descriptor, 2)
        os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):  # it is None if it was closed
        sys.stdout.reconfigure(line_buffering=True)  # buffered output of a killed process would be lost


# Deadlines for one completion, so that a slow completion does not cost the others of its group their reward.

_PATIENT, _HURRIED = 2, 1 / 8  # late completions after which Patience shortens the time, and the factor
_OF_THE_REST = 1 / 4  # share of the time left to a call that one completion may take (computing)
_OF_OTHERS, _OF_THE_LAST = 1 / 2, 9 / 10  # such shares for a user's function of one completion (sharing)
_LEAST_S = 0.01  # the shortest limit in seconds
_ends: list[float] = []  # ends of the calls that this process answers, in time.monotonic; the last one counts


class Late(BaseException):
    """It took too long: whoever set the time says so of that completion; a BaseException, since libraries catch
    exceptions of what they do not understand."""


@contextmanager
def answering(seconds: float | None) -> Iterator[None]:
    """Declares that the block must end within so many seconds of wall time (None: no limit). It is not enforced here:
    `computing` and `sharing` inside it give each completion a share of this time."""
    if seconds is not None:
        _ends.append(time.monotonic() + seconds)
    try:
        yield
    finally:
        if seconds is not None:
            _ends.pop()


@contextmanager
def within(seconds: float, error: type[BaseException] = Late, again_s: float | None = None) -> Iterator[None]:
    """Raises `error` inside the block after `seconds` of wall time, and again after each `again_s` (None: seconds),
    since code may catch it.

    This uses SIGALRM: C code that does not check for signals is not interrupted (regular expressions do check). There
    is no limit outside the main thread, in which reward processes call their functions.
    """
    with _alarms({signal.ITIMER_REAL: (seconds, again_s or seconds)}, error):
        yield


@contextmanager
def computing(seconds: float, error: type[BaseException] = Late) -> Iterator[None]:
    """Limits the block like `within`, but in CPU time of this process, so that a busy machine makes no computation
    late. Inside `answering` it also limits wall time, to a quarter of what the call has left, so that the call is never
    late, however many completions are."""
    timers = {signal.ITIMER_PROF: (seconds, seconds)}
    if _ends:
        rest = max(_LEAST_S, (_ends[-1] - time.monotonic()) * _OF_THE_REST)
        timers[signal.ITIMER_REAL] = rest, rest
    with _alarms(timers, error):
        yield


@contextmanager
def sharing(last: bool, error: type[BaseException] = Late) -> Iterator[None]:
    """Limits the wall time of one completion to half of what its call has left, or to nine tenths for the last
    completion of a group. There is no limit if other code has set a handler of SIGALRM, since it then limits itself."""
    if not _ends or signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
        yield
        return
    rest = max(_LEAST_S, (_ends[-1] - time.monotonic()) * (_OF_THE_LAST if last else _OF_OTHERS))
    with _alarms({signal.ITIMER_REAL: (rest, rest)}, error):
        yield


@contextmanager
def _alarms(timers: dict[int, tuple[float, float]], error: type[BaseException]) -> Iterator[None]:
    """Raises `error` at each alarm. timers: by timer, seconds to the first alarm and between further ones."""
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
        over = True  # set before the timers are stopped, since an alarm may come in between
        for timer, handler in before.items():
            signal.setitimer(timer, 0)
            if signal.getsignal(signals[timer]) is late:  # a module imported in the block may have set its own handler
                signal.signal(signals[timer], handler)


class Patience:
    """The time limit of the completions of one group: each may compute for `seconds`, or for an eighth of it once two
    were late. late: how many were."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.late = 0

    @property
    def seconds(self) -> float:
        """CPU seconds that the next completion may take."""
        return self._seconds * (_HURRIED if self.late >= _PATIENT else 1.0)

    @contextmanager
    def with_one(self) -> Iterator[None]:
        """Computes one completion: raises Late inside the block when its time is over, and counts it."""
        try:
            with computing(self.seconds):
                yield
        except Late:
            self.late += 1
            raise
