"""Where a policy's code may run: as this user or another, where the kernel gives namespaces and where it does not."""

import os
import sys
from itertools import product
from pathlib import Path

import pytest

OTHER = 54321  # a user that nobody is
CONTEXTS = [
    pytest.param(
        user,
        namespaces,
        id=f"{'this user' if user is None else 'another user'}, {'' if namespaces else 'no '}namespaces",
    )
    for user, namespaces in product((None, OTHER), (True, False))
]
# Takes a process into one: a filter of system calls refuses namespaces as a container's runtime does.
ENTER = """
import ctypes, os, struct
def enter(user, namespaces):
    libc = ctypes.CDLL(None, use_errno=True)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as a program of that user is
    if not namespaces:
        number = {"x86_64": 272, "aarch64": 97}[os.uname().machine]  # unshare
        steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
        code = b"".join(struct.pack("<HBBI", *step) for step in steps)
        kept = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("<HxxxxxxQ", len(steps), ctypes.addressof(kept))
        assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0
"""


def skip_unless_possible(user: int | None, *, starts_python: bool) -> None:
    """Skips what this test process cannot have. starts_python: the other user starts interpreters, too."""
    if user is None:
        return
    if os.geteuid() != 0:
        pytest.skip("another user: only root can become one")
    real = Path(os.path.realpath(sys.executable))
    closed = [folder for path in (real, Path(__file__)) for folder in path.parents if not folder.stat().st_mode & 0o001]
    if starts_python and closed:
        pytest.skip(f"another user: cannot start this Python, since {closed[0]} is closed to others")
