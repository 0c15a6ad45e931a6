"""The environment of a reward process: what programs need to run, and no tokens but those that a reward names.

A reward process serves all reward functions of a run, calls of one at a time. A variable that one of them names is set
during the calls of that one only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rewards import limits
from rewards.base import RewardError, said

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
    if limits.memory_met(error):
        return f"{told}: {limits.memory_advice()}"
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
    """The variables that a reward names, as they are here. Raises RewardError if one is not set."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RewardError(
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
