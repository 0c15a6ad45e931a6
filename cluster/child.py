"""Processes that run somebody else's code, or that may hang: how each starts, answers by a deadline, and ends.

There are three kinds. `forked` calls functions in copies of this process, which knows already what they need. A
`Program` is started from its command. An `Interpreter` is a fresh Python that is asked one thing after the other.
What they have in common is here: they end with the process that started them (`end_with_parent`), or are killed with
all that they have started (`end_tree`); deadlines count only seconds in which this process ran (cluster.actor.Awake);
and none has a copy of a lock or socket that is not its own.

Walls are the matter of who knows what is to run: cluster.confinement, rewards.worker.confine. Linux.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import runpy
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from typing import Any, BinaryIO, NamedTuple, NoReturn

from cluster import actor
from cluster.machine import descendants, kill

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
LENGTH = 8  # bytes before each message on a socket, which are its length
MOST_FORKED = 8 << 10  # bytes that a forked function may answer
_PIPE = 3  # its descriptor in a fork
_PART, _MOST = 1 << 20, 1 << 30  # bytes that are read of a socket at once, and of a message of which that is a flood


class Died(RuntimeError):
    """It ended, or closed its end, without an answer. code: its exit code, negative that of a signal."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"it ended with exit code {code}")
        self.code = code


class Raised(RuntimeError):
    """What was asked raised an exception, or answered with what cannot be sent; the text is its traceback, as the
    exception itself may not be known here."""


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


def forked(
    functions: Sequence[Callable[[], object]], seconds: float, walls: Callable[[], object], *, most: int = MOST_FORKED
) -> list[Outcome]:
    """Calls each function in a copy of this process, all at once, and ends the copies.

    A copy ends with this process, and has of all that is open here the standard streams alone: neither a lock nor a
    socket is held by it. It calls `walls` first. Its answer comes as JSON and never as a pickle, since what was called
    may have written it; one that is longer than `most` bytes, or is none, counts as the end of its process. A function
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
        told, late = _told([fork.pipe for fork in forks], seconds, most)
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


def _told(pipes: Sequence[int], seconds: float, most: int) -> tuple[dict[int, bytes], set[int]]:
    """All that came from each pipe until its end, or until it was too much, and those that had no end in time."""
    told = dict.fromkeys(pipes, b"")
    clock = actor.Awake(seconds)
    with selectors.DefaultSelector() as waiting:
        for pipe in pipes:
            waiting.register(pipe, selectors.EVENT_READ)
        while waiting.get_map() and (left := clock.left()) > 0:
            for key, _ in waiting.select(min(left, actor.LOOK_S)):
                part = os.read(key.fd, most + 1)
                told[key.fd] += part
                if not part or len(told[key.fd]) > most:
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
    return file  # type: ignore[return-value]  # a FileIO is one


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


# A fresh interpreter that is asked.


class Interpreter:
    """Calls functions of our modules in a Python of its own, one after the other; started by multiprocessing's spawn.

    Used by one thread at a time, but for `kill`. As the process is to end with us, and the kernel goes by the thread
    that has started it, that thread must live as long.
    """

    def __init__(self, begin: Callable[..., None], *arguments: Any) -> None:
        """begin: what the process calls first, with these arguments: it puts up the walls. Raises OSError where no
        process can be started."""
        self._end, theirs = socket.socketpair()
        with theirs:
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(target=_serve, args=(theirs, begin, arguments), daemon=True)
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._begun = False

    def lives(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.exitcode is None

    def ask(self, function: Callable[..., Any], arguments: tuple[Any, ...], seconds: float, start_s: float) -> Any:
        """What the function answers there, within `seconds` from when it takes the question; within start_s it has to
        begin. What it answers is unpickled here, so `function` returns plain values of ours.

        Raises TimeoutError and Died, after which it is of no more use, and Raised.
        """
        try:
            if not self._begun:
                self._receive(actor.Awake(start_s))
                self._begun = True
            clock = actor.Awake(seconds)
            left = memoryview(_framed(pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)))
            while left:
                left = left[self._patiently(lambda part=left: self._end.send(part), clock) :]
            fine, answer = pickle.loads(self._receive(clock))
        except (EOFError, ConnectionError, pickle.UnpicklingError):
            raise self._death() from None
        if not fine:
            raise Raised(answer)
        return answer

    def _receive(self, clock: actor.Awake) -> bytes:
        return _message(lambda size: self._patiently(lambda: self._end.recv(size), clock))

    def _patiently(self, step: Callable[[], Any], clock: actor.Awake) -> Any:
        """What a step on the socket gives, once the other end is so far. Raises TimeoutError, EOFError."""
        while (left := clock.left()) > 0:
            self._end.settimeout(min(left, actor.LOOK_S))
            try:
                return step()
            except TimeoutError:
                if not self.lives():  # though a process that it left behind has its end of the socket
                    raise EOFError from None
        raise TimeoutError

    def _death(self) -> Died:
        end_process(self._process)  # which changes no exit code of one that has closed its end by ending
        return Died(self._process.exitcode)

    def kill(self) -> None:
        """Ends it, and tells so whoever waits for its answer. For any thread."""
        self._process.kill()

    def end(self) -> None:
        """Ends it and all that it has started. Blocks until it is gone."""
        end_process(self._process)
        self._end.close()


def _serve(end: socket.socket, begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """The process of an Interpreter, to its end."""
    keep_from_children(end.fileno())
    begin(*arguments)
    end.sendall(_framed(b""))  # it is there
    with contextlib.suppress(EOFError, ConnectionError):  # who asks has gone
        while True:
            end.sendall(_framed(_called(_message(end.recv))))
    os._exit(0)  # not held up by threads that somebody's code has left behind


def _called(asked: bytes) -> bytes:
    try:
        function, given = pickle.loads(asked)
        return pickle.dumps((True, function(*given)), pickle.HIGHEST_PROTOCOL)
    except BaseException:  # sys.exit() in somebody's code is its fault, not the end of the process
        return pickle.dumps((False, traceback.format_exc()))


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(LENGTH) + message


def _message(receive: Callable[[int], bytes]) -> bytes:
    """The next message. Raises EOFError where there is none, or a flood."""

    def whole(size: int) -> bytes:
        found = bytearray()
        while len(found) < size <= _MOST:
            if not (part := receive(min(size - len(found), _PART))):
                break
            found += part
        if len(found) < size:
            raise EOFError
        return bytes(found)

    return whole(int.from_bytes(whole(LENGTH)))


if __name__ == "__main__":
    main(*sys.argv[1:])
