"""The memory cap of a reward process, and what is said of a function that met it."""

import resource

DEFAULT = 4 << 30  # bytes: torch and a reward model of a billion parameters in 16 bits, or any number of checkers
GIB = 1 << 30
# What other languages say in place of a MemoryError.
_SAID = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "unable to allocate")


def cap(memory_bytes: int) -> None:
    """Limits the memory that this process, and each that it starts, can write to.

    Not its address space, which CUDA, torch and thread pools reserve by tens of GB and never fill.
    """
    limit(resource.RLIMIT_DATA, memory_bytes)


def limit(kind: int, value: int) -> None:
    """Sets a limit that this process cannot raise again; a lower one that is set already stays."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def met(error: BaseException) -> bool:
    """True if `error` says that main memory ran out (a GPU's memory has no cap here)."""
    if isinstance(error, MemoryError):
        return True
    try:
        text = str(error).lower()
    except BaseException:  # whatever the __str__ of somebody's exception does
        return False
    return "cuda" not in text and any(words in text for words in _SAID)


def advice(key: str = "rollout.reward_memory") -> str:
    """The cap of this process, which it met, and what to set instead: the setting of that name."""
    bytes_ = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if bytes_ == resource.RLIM_INFINITY:
        return "the machine has no more memory"
    return (
        f"its process may hold {bytes_ / GIB:g} GiB: raise {key}, for example to "
        f"{2 * bytes_ / GIB:g}GiB, or let the function need less"
    )
