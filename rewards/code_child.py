"""What runs a policy's Python code: a program of its own, in a fresh interpreter, with limits that it sets itself.

    python -I code_child.py SECONDS MEMORY_BYTES FILE_BYTES < code

It imports nothing of ours, since a trajectory waits for its start.
"""

import _posixsubprocess
import ctypes
import linecache
import os
import resource
import signal
import sys
import traceback
from typing import Any, NoReturn

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_AF_UNIX = 1  # linux/socket.h
# What Python says before it does it (docs.python.org, audit events), by its beginning.
_STARTS_PROCESSES = ("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn")
_OPENS_NETWORK = ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostby",
                  "socket.getnameinfo")  # fmt: skip


def confine(seconds: int, memory_bytes: int, file_bytes: int) -> None:
    """Sets the limits, for good. Raises OSError where the kernel does not know one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # In a user namespace of its own root has no rights outside. Where the kernel refuses, what is refused below is all.
    libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_DATA: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NPROC: 0,  # the kernel does not hold root to this one
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    sys.addaudithook(_refuse)
    _posixsubprocess.fork_exec = _refuse_process  # of multiprocessing; there is no event of it


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith(_STARTS_PROCESSES):
        _refuse_process()
    # A socket of the Unix kind is let be until it is to reach somebody: asyncio's event loop has a pair of them.
    other_kind = event == "socket.__new__" and arguments[1] != _AF_UNIX
    addressed = event == "socket.sendmsg" and arguments[1] is not None
    if other_kind or addressed or event.startswith(_OPENS_NETWORK):
        raise PermissionError("code has no network here")


def _refuse_process(*_: object) -> NoReturn:
    raise PermissionError("code may start no processes here")


def run(code: str) -> int:
    """Runs code as a program; returns its exit status. What it raises is told as Python does, less our own lines."""
    linecache.cache["<code>"] = (len(code), None, code.splitlines(keepends=True), "<code>")  # for tracebacks
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            sys.stdout.flush()
            print(ended.code, file=sys.stderr)
        return 0 if ended.code in (None, 0) else 1
    except BaseException as error:
        mine = error.__traceback__
        sys.stdout.flush()
        traceback.print_exception(type(error), error, mine.tb_next if mine is not None else None)
        return 1
    return 0


if __name__ == "__main__":
    text = sys.stdin.read()
    confine(*map(int, sys.argv[1:]))
    status = run(text)
    sys.stdout.flush()
    os._exit(status)  # threads that code left behind do not keep it
