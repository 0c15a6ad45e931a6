"""Processes that run somebody else's code, or that may hang: how each starts, answers by a deadline, and ends.

There are two kinds. `forked` calls functions in copies of this process, which knows already what they need. A `Program`
is started from its command. What they have in common is here: they end with the process that started them
(`end_with_parent`), or are killed with all that they have started (`end_tree`); deadlines count only seconds in which
this process ran (cluster.actor.Awake); and none has a copy of a lock or socket that is not its own.

Walls are the matter of who knows what is to run: cluster.confinement, rewards.slot.confine. Linux.
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

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MOST_FORKED = 8 << 10  # bytes that a forked function may answer
_PIPE = 3  # its descriptor in a fork


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> bool:
    """Has the kernel send this process a signal once the *thread* of `parent` that started it ends. Returns whether
    `parent` is there still: if it ended before, no signal comes, and the caller leaves by itself.

    Raises OSError where the kernel refuses it.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    return os.getppid() == parent


def end_tree(pid: int) -> None:
    """Kills a process that nobody has waited for yet, all that descend from it, and all of its group, whose members may
    have outlived those who started them. What has detached itself from all of these is not found."""
    every = [pid, *descendants(pid)]
    with contextlib.suppress(ProcessLookupError):  # it has no group of its own
        os.killpg(pid, signal.SIGKILL)
    kill(every)


def end_process(process: BaseProcess) -> None:
    """The same of a process of multiprocessing. Blocks until it is gone."""
    assert process.pid is not None
    if process.exitcode is None:
        end_tree(process.pid)
    else:
        with contextlib.suppress(ProcessLookupError):  # nothing was left
            os.killpg(process.pid, signal.SIGKILL)
    process.join()


def silence() -> None:
    """This process reads nothing more by its standard streams, and what it writes there is lost."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)


def keep_from_children(descriptor: int) -> None:
    """A process that this one forks has nothing there: who waits for the end of ours would wait for its end, too."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, descriptor))


# Functions in copies of this process. A copy costs milliseconds, where a fresh interpreter would import all anew.


class Outcome(NamedTuple):
    """What became of a function: its `answer`, or else whether it was late, or the exit code of its process."""

    answer: Any = None
    late: bool = False
    code: int | None = None


class _Fork(NamedTuple):
    pid: int
    pipe: int
    nonce: bytes  # without which nothing counts that comes from the pipe


def forked(functions: Sequence[Callable[[], object]], seconds: float, walls: Callable[[], object]) -> list[Outcome]:
    """Calls each function in a copy of this process, all at once, and ends the copies.

    A copy ends with this process, and has of all that is open here the standard streams alone: neither a lock nor a
    socket is held by it. It calls `walls` first. Its answer comes as JSON and never as a pickle, since what was called
    may have written it; one that is longer than 8 KiB, or is none, counts as the end of its process. A function
    that raises has ended its process, too.

    To be called where no other thread holds a lock that a function needs: the copy has no threads. Raises OSError if no
    process can be started; those that were are ended then.
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
            end_tree(fork.pid)  # which changes no exit code of one that has closed its pipe by ending
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
    """The copy, to its end."""
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
    """Closes all but the standard streams and the pipe."""
    os.dup2(pipe, _PIPE)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > _PIPE:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(int(name))


def _told(pipes: Sequence[int], seconds: float) -> tuple[dict[int, bytes], set[int]]:
    """All that came from each pipe until its end, or until it was too much, and those that had no end in time."""
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


# Programs. What they read and write is in files that have no name: nothing that one can change is opened by its name
# here, and neither side waits for the other to read.


def nameless(content: bytes = b"") -> BinaryIO:
    """A file in memory with this content; the limit of a file's size (RLIMIT_FSIZE) bounds what its writer makes of
    it."""
    file = open(os.memfd_create("child"), "w+b", buffering=0)  # noqa: SIM115 - of the caller
    file.write(content)
    file.seek(0)
    return file


def written(file: BinaryIO) -> str:
    """All that its writer made of it."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode("utf-8", "replace")


class Program:
    """A program in a session of its own, that signals of a terminal do not reach.

    Attributes:
        ended: done once it has ended, however that came.
    """

    def __init__(self, command: Sequence[str], **how: Any) -> None:
        """how: as of subprocess.Popen. Raises OSError, or RuntimeError, where this process can start none."""
        self._process = subprocess.Popen(command, start_new_session=True, **how)
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # who waits and is cancelled does not cancel it
        try:
            threading.Thread(target=self._wait, name="child", daemon=True).start()
        except RuntimeError:
            self.kill()
            self.code()
            raise

    def _wait(self) -> None:
        with contextlib.suppress(ChildProcessError):  # `code` was faster
            # It stays a zombie until then, so that its number, and that of its group, are nobody else's.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        self.ended.set_result(None)

    def within(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        clock = actor.Awake(seconds)
        while not self.ended.done() and (left := clock.left()) > 0:
            with contextlib.suppress(TimeoutError):
                self.ended.result(min(left, actor.LOOK_S))
        return self.ended.done()

    def kill(self) -> None:
        """Ends it and all that it has started, if that is there still. May be called again."""
        if self._process.returncode is None:
            end_tree(self._process.pid)

    def code(self) -> int:
        """Waits for its end -> its exit code, negative that of a signal."""
        return self._process.wait()


def tied(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules as `python -m` does, in a process that ends with the thread that starts
    it. Not by a function between fork and exec (preexec_fn), which is not safe beside threads."""
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), module, *arguments]


def main(parent: str, module: str, *arguments: str) -> None:
    """The process of `tied`."""
    if not end_with_parent(int(parent)):
        sys.exit(1)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
