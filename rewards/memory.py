"""What a reward process may hold: its memory cap, what is said of a function that met it, and what has leaked."""

import errno
import os
import resource
from pathlib import Path
from typing import NamedTuple

from cluster.confinement import limit

DEFAULT = 4 << 30  # bytes: torch and a reward model of a billion parameters in 16 bits, or any number of checkers
GIB = 1 << 30
_CAUSES = 10  # of an exception that are looked at
_THREADS = 1000  # that a function may have: no limit of the kernel says so
# What other languages say in place of a MemoryError.
_SAID = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "unable to allocate")


def cap(memory_bytes: int) -> None:
    """Limits the memory that this process, and each that it starts, can write to.

    Not its address space, which CUDA, torch and thread pools reserve by tens of GB and never fill.
    """
    limit(resource.RLIMIT_DATA, memory_bytes)


def met(error: BaseException) -> bool:
    """True if `error` says that main memory ran out (a GPU's memory has no cap here)."""
    if isinstance(error, MemoryError):
        return True
    try:
        text = str(error).lower()
    except BaseException:  # whatever the __str__ of somebody's exception does
        return False
    return "cuda" not in text and any(words in text for words in _SAID)


def spent(error: BaseException) -> bool:
    """True if it says that the process had no memory, files or threads left, which other calls may have taken."""
    told: BaseException | None = error
    for _ in range(_CAUSES):
        if told is None:
            return False
        if met(told) or (isinstance(told, OSError) and told.errno in (errno.EMFILE, errno.ENOMEM)):
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

    def leaks(self, begun: "Usage", near: float = 0.9) -> bool:
        """Whether so much of a limit is taken, much of it since the beginning."""
        most = resource.getrlimit(resource.RLIMIT_DATA)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[0], _THREADS
        return any(
            limit != resource.RLIM_INFINITY and now > near * limit and now - first > near / 2 * (limit - first)
            for now, first, limit in zip(self, begun, most, strict=True)
        )


def usage() -> Usage:
    """As it is now: proc(5), statm and stat."""
    threads = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[17])
    return Usage(held(), len(os.listdir("/proc/self/fd")), threads)


def held() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def advice(key: str = "rollout.reward_memory") -> str:
    """The cap of this process, which it met, and what to set instead: the setting of that name."""
    bytes_ = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if bytes_ == resource.RLIM_INFINITY:
        return "the machine has no more memory"
    return (
        f"its process may hold {bytes_ / GIB:g} GiB: raise {key}, for example to "
        f"{2 * bytes_ / GIB:g}GiB, or let the function need less"
    )
