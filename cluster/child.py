"""Starts and ends child processes that run untrusted code or may hang. Linux only.

`forked` calls functions in forked copies of this process, which has loaded what the functions need. A `Program` is
started from its command line. Both kinds end with the process that started them (`end_with_parent`) and are killed
together with all that they started (`end_tree`). Their deadlines count only seconds in which this process ran
(cluster.actor.Awake), and no child inherits a lock or socket of its parent.

This module does not confine what a child may do; the callers do (cluster.confinement, rewards.slot.confine).
"""

import contextlib
import ctypes
import json
import os
import runpy
import secrets
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from typing import Any, BinaryIO, NamedTuple, NoReturn

from cluster import actor
from cluster.machine import descendants, kill

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_MOST_FORKED = 8 << 10  # bytes of a forked function's answer, at most
_PIPE = 3  # the descriptor of the answer pipe in a forked copy


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> bool:
    """Asks the kernel to send this process the signal `number` when the *thread* of `parent` that started it ends.
    Returns whether `parent` still runs: if it ended earlier, no signal comes, and the caller must exit.

    Raises OSError if the kernel refuses.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


def adopt_orphans() -> None:
    """Makes this process the parent of every process that descends from it and loses its own, in whatever session: so
    `end_tree` of this process finds them. Raises OSError if the kernel refuses."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_tree(pid: int) -> None:
    """Kills a process that was not waited for yet, its descendants, and its process group, some of whose members may
    have lost their parents. A process that left both the tree and the group is not found."""
    every = [pid, *descendants(pid)]
    with contextlib.suppress(ProcessLookupError):  # the process has no group of its own
        os.killpg(pid, signal.SIGKILL)
    kill(every)


def end_process(process: BaseProcess) -> None:
    """Kills a multiprocessing process as `end_tree` does, and waits until it has ended."""
    assert process.pid is not None
    if process.exitcode is None:
        end_tree(process.pid)
    else:
        with contextlib.suppress(ProcessLookupError):  # no process of the group is left
            os.killpg(process.pid, signal.SIGKILL)
    process.join()


def silence() -> None:
    """Redirects the standard streams of this process to /dev/null."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)


def keep_from_children(descriptor: int) -> None:
    """Replaces this descriptor by /dev/null in each process that this one forks. Otherwise the reader of a pipe or
    socket would see its end only after all forked processes have ended too."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, descriptor))


# Functions in forked copies of this process. A fork takes milliseconds; a fresh interpreter would import everything
# again.


class Outcome(NamedTuple):
    """The result of one function of `forked`. answer: what it returned. late: it did not answer in time. code: the exit
    code of its process, if that ended without an answer."""

    answer: Any = None
    late: bool = False
    code: int | None = None


class _Fork(NamedTuple):
    pid: int
    pipe: int
    nonce: bytes  # begins an answer; other bytes in the pipe are ignored


def forked(functions: Sequence[Callable[[], object]], seconds: float, walls: Callable[[], object]) -> list[Outcome]:
    """Calls each function in a forked copy of this process, all at the same time, and kills the copies.

    A copy first calls `walls`, which confines it. It ends with this process, and of the open files of this process it
    keeps only the standard streams. It answers in JSON and never in pickle, since untrusted code may have written the
    answer. A function that raises, and an answer that is not JSON or longer than 8 KiB, give the Outcome of a process
    that ended without an answer.

    No other thread may hold a lock that a function needs, since a copy has no other threads. Raises OSError, after
    killing the copies already started, if a process cannot be started.
    """
    forks: list[_Fork] = []
    told: dict[int, bytes] = {}
    late: set[int] = set()
    codes: list[int] = []
    try:
        for function in functions:
            forks.append(_fork(function, walls))
        told, late = _told([fork.pipe for fork in forks], seconds)
    finally:
        for fork in forks:
            end_tree(fork.pid)  # a process that closed its pipe by ending keeps its exit code
            codes.append(os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1]))
            os.close(fork.pipe)
    return [
        Outcome(late=True) if fork.pipe in late else _outcome(told[fork.pipe], fork, code)
        for fork, code in zip(forks, codes, strict=True)
    ]


def _fork(function: Callable[[], object], walls: Callable[[], object]) -> _Fork:
    nonce, parent = secrets.token_hex(16).encode(), os.getpid()
    read, write = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _answer(function, walls, write, nonce, parent)
    except OSError:
        os.close(read)
        raise
    finally:
        os.close(write)
    return _Fork(pid, read, nonce)


def _answer(
    function: Callable[[], object], walls: Callable[[], object], pipe: int, nonce: bytes, parent: int
) -> NoReturn:
    """Runs in the forked copy until it exits: writes the nonce and the answer to `pipe`."""
    status = 1
    try:
        if end_with_parent(parent):
            _keep(pipe)
            walls()
            left = memoryview(nonce + json.dumps(function()).encode())
            while left:
                left = left[os.write(_PIPE, left) :]
            status = 0
    finally:
        os._exit(status)


def _keep(pipe: int) -> None:
    """Moves `pipe` to descriptor _PIPE and closes all other descriptors but the standard streams."""
    os.dup2(pipe, _PIPE)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _PIPE:
            with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed already
                os.close(int(name))


def _told(pipes: Sequence[int], seconds: float) -> tuple[dict[int, bytes], set[int]]:
    """Reads each pipe until its end or _MOST_FORKED bytes. Returns the bytes by pipe, and the pipes that did not end
    within `seconds`."""
    told = dict.fromkeys(pipes, b"")
    clock = actor.Awake(seconds)
    with selectors.DefaultSelector() as waiting:
        for pipe in pipes:
            waiting.register(pipe, selectors.EVENT_READ)
        while waiting.get_map() and (left := clock.left()) > 0:
            for key, _ in waiting.select(min(left, actor.LOOK_S)):
                part = os.read(key.fd, _MOST_FORKED)
                told[key.fd] += part
                if not part or len(told[key.fd]) > _MOST_FORKED:
                    waiting.unregister(key.fd)
        return told, {key.fd for key in waiting.get_map().values()}


def _outcome(told: bytes, fork: _Fork, code: int) -> Outcome:
    if told.startswith(fork.nonce):
        with contextlib.suppress(ValueError):
            return Outcome(json.loads(told.removeprefix(fork.nonce)))
    return Outcome(code=code)


# Programs. Their input and output are files without a name (memfd): a program cannot replace a file that this process
# opens later, and neither side blocks until the other reads.


def nameless(content: bytes = b"") -> BinaryIO:
    """Returns a file in memory with this content. The RLIMIT_FSIZE of a process that writes it bounds its size."""
    file = open(os.memfd_create("child"), "w+b", buffering=0)  # noqa: SIM115 - of the caller
    file.write(content)
    file.seek(0)
    return file


def written(file: BinaryIO) -> str:
    """Returns the whole text of a file of `nameless`."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode("utf-8", "replace")


class Program:
    """A running program, in a session of its own, which signals of the terminal do not reach.

    Attributes:
        ended: a future that is done once the program has ended for any reason.
    """

    def __init__(self, command: Sequence[str], **how: Any) -> None:
        """how: further arguments of subprocess.Popen. Raises OSError or RuntimeError if no process or thread can be
        started."""
        self._process = subprocess.Popen(command, start_new_session=True, **how)
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # a waiting task that is cancelled cannot cancel the future
        try:
            threading.Thread(target=self._wait, name="child", daemon=True).start()
        except RuntimeError:
            self.kill()
            self.code()
            raise

    def _wait(self) -> None:
        with contextlib.suppress(ChildProcessError):  # `code` has already collected the exit code
            # WNOWAIT leaves a zombie until `code` is called, so that no other process gets this pid or group id.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.ended.set_result(None)

    def within(self, seconds: float) -> bool:
        """Waits at most `seconds` for the program to end. Returns whether it has ended."""
        clock = actor.Awake(seconds)
        while not self.ended.done() and (left := clock.left()) > 0:
            with contextlib.suppress(TimeoutError):
                self.ended.result(min(left, actor.LOOK_S))
        return self.ended.done()

    def kill(self) -> None:
        """Kills the program and all processes that it started. May be called again."""
        if self._process.returncode is None:
            end_tree(self._process.pid)

    def code(self) -> int:
        """Waits until the program has ended and returns its exit code; -n means that signal n ended it."""
        return self._process.wait()


def tied(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs one of our modules, as `python -m` does, in a process that ends with the thread
    that starts it. (A preexec_fn could call `end_with_parent` too, but is not safe in a process with threads.)"""
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), module, *arguments]


def main(parent: str, module: str, *arguments: str) -> None:
    """Entry point of the command of `tied`."""
    if not end_with_parent(int(parent)):
        sys.exit(1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
