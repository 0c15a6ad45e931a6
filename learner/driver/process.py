"""The process of a command: it imports gleaner's own packages, survives the loss of its standard streams, and ends
cleanly when a signal asks it to. Imports only what starts fast: the standard library and cluster.own_path."""

import ast
import asyncio
import errno
import io
import os
import select
import signal
import sys
import threading
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, PackagePath, distributions, files
from pathlib import Path
from signal import Signals
from types import FrameType
from typing import Any, TextIO

from cluster.own_path import PACKAGES, ROOT, theirs

# Whether another distribution was installed over a package of this project: pip does so without a warning, and other
# distributions have packages with names as plain as `rewards`.


OURS = "gleaner-rl"


def installed_over(packages: Sequence[str]) -> str:
    """A sentence that names the other distribution, or ''; always '' in a repository, which pip has not copied."""
    for file in _first_files(packages):
        if _is_as_recorded(file):
            continue
        for other in distributions():
            name = other.metadata["Name"]
            if name != OURS and str(file) in map(str, other.files or ()):
                return (
                    f"{file.locate()} is the distribution {name}'s, installed over gleaner's package {file.parent}; "
                    f"install gleaner-rl again in an environment without {name}"
                )
    return ""


def _first_files(packages: Sequence[str]) -> Iterator[PackagePath]:
    """`__init__.py` of each package that pip has recorded."""
    try:
        recorded = files(OURS) or []
    except PackageNotFoundError:
        return
    names = {f"{package}/__init__.py" for package in packages}
    yield from (file for file in recorded if str(file) in names and file.hash is not None)


def _is_as_recorded(file: PackagePath) -> bool:
    path = file.locate()
    with open(str(path), "rb") as stream:
        digest = urlsafe_b64encode(sha256(stream.read()).digest()).rstrip(b"=").decode()
    return file.hash is None or file.hash.value == digest


# Where a call of learner.main.main cannot work: where PYTHONPATH has other packages with gleaner's names, inside a
# running event loop, and in a script without a guard.


def ours_first() -> None:
    """Moves folders that have a module with one of gleaner's names to the end of sys.path, for this process and those
    that multiprocessing starts from it. The user's files in such folders are loaded by path (rewards.loader)."""
    sys.path.sort(key=lambda entry: next(theirs(entry), None) is not None)  # a stable sort: the others keep their order


def hidden_package() -> str:
    """A sentence if a new process would import another module in place of a package of this project, or ''.

    The working directory does not matter: no process of a run has it on its path before gleaner's packages.
    """
    given = os.environ.get("PYTHONPATH")
    for folder in given.split(os.pathsep) if given else ():
        if Path(folder).resolve() == ROOT:
            break
        if (file := next(theirs(folder), None)) is not None:
            name = file.parent.name if file.name == "__init__.py" else file.stem
            return (
                f"PYTHONPATH: {file} hides gleaner's package {name} (in {ROOT}) in the processes of a run; rename it, "
                "or leave that folder out"
            )
    return installed_over(PACKAGES)


def wrong_place() -> str:
    """A sentence if a run cannot be started from where this function is called, or ''."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _unguarded()
    return (
        "main() runs an event loop of its own and cannot be called inside one, as in a notebook; call "
        "learner.train(config=FILE), which starts a process"
    )


def _unguarded() -> str:
    """A sentence if the main script calls main() without a guard, or ''. Reward processes import the main script again,
    and must not run that call."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__main__"):
        frame = frame.f_back
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if frame is None or script is None or frame.f_globals.get("__spec__") is not None:  # `python -m` sets __spec__
        return ""
    try:
        tree = ast.parse(Path(script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno):
            guarded = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            return "" if guarded else _advice(script, frame.f_lineno)
    return ""


def _advice(script: str, line: int) -> str:
    return (
        f"{script}, line {line}: main() starts processes that import this script again; put the call under "
        'if __name__ == "__main__":'
    )


# Standard input, output and error that are closed or break: `gleaner train ... | head`, a dead tee, a terminal that
# vanishes, a full disk behind `>`, `>&-`. Such a run goes on, and only its output is lost.
#
# A descriptor that is closed at the start becomes /dev/null; otherwise a file of the run could be opened under its
# number, and be written into. A descriptor that can no longer be written becomes the file of `streams_kept_in`, or
# /dev/null before that is set, also for libraries, threads and child processes that write to it.

CONSOLE = "console.log"  # file of a run's folder with the output that could not be written where it should go

_kept: Path | None = None  # the file of streams_kept_in
_in_file: set[int] = set()  # descriptors that have become that file
_lost: dict[int, OSError] = {}  # descriptor -> error because of which its output was lost
_commentary = False
_originals: list[Any] = []  # replaced streams, which are kept because a deleted one would close its descriptor


class _Lasting(io.FileIO):
    """A file on a descriptor, to which writing never fails."""

    def write(self, data: Any) -> int:
        """Writes all of `data`, and returns its length in bytes."""
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            try:
                count = super().write(left)
            except OSError as error:
                _replace(self.fileno(), error)
                continue
            if count is None:  # O_NONBLOCK is set, as some programs do that share a terminal with this one
                writable = select.poll()
                writable.register(self.fileno(), select.POLLOUT)
                writable.poll()
            left = left[count or 0 :]
        return size


def keep_streams() -> None:
    """Replaces this process's standard streams by ones to which writing never fails. Streams that other code has put in
    the place of sys.stdout or sys.stderr are left alone."""
    _open_closed()
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream, own = getattr(sys, name), getattr(sys, f"__{name}__")
        if stream is own and not (own is not None and isinstance(getattr(own.buffer, "raw", own.buffer), _Lasting)):
            setattr(sys, name, _lasting(descriptor, own))
            setattr(sys, f"__{name}__", getattr(sys, name))


def _open_closed() -> None:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            _point(descriptor, os.devnull, os.O_RDWR)


def _lasting(descriptor: int, own: Any) -> TextIO:
    raw = _Lasting(descriptor, "w", closefd=False)
    if own is None:  # the stream was closed when Python started
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    own.flush()
    _originals.append(own)
    unbuffered = isinstance(own.buffer, io.FileIO)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        own.encoding, own.errors, line_buffering=own.line_buffering, write_through=own.write_through,
    )  # fmt: skip


def streams_kept_in(file: Path) -> None:
    """From now on, output that cannot be written to its descriptor is appended to this file (made when needed)."""
    global _kept
    _kept = file
    for descriptor in list(_lost):
        if _to_file(descriptor):
            del _lost[descriptor]


def streams_are_commentary() -> None:
    """Declares that the output is not the purpose of this process: `streams_outcome` then ignores its loss."""
    global _commentary
    _commentary = True


def streams_outcome(code: int) -> int:
    """The exit code of a process that would end with `code`: 1 instead of 0 if standard output could not be written,
    and an error is printed. A reader that closed its pipe is no error: it has read what it wanted."""
    sys.stdout.flush()
    error = _lost.get(1)
    if error is None or _commentary or error.errno == errno.EPIPE:
        return code
    print(f"error: standard output could not be written ({error.strerror}); send it elsewhere", file=sys.stderr)
    return code or 1


def _replace(descriptor: int, error: OSError) -> None:
    """Replaces a descriptor, to which the last write failed with `error`, by the file or by /dev/null."""
    if _kept is None or descriptor in {*_in_file, *_lost} or not _to_file(descriptor):
        _lost.setdefault(descriptor, error)
        _point(descriptor, os.devnull, os.O_WRONLY)


def _to_file(descriptor: int) -> bool:
    assert _kept is not None
    try:
        _point(descriptor, _kept, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    except OSError:  # other files of the run fail, too, and the run reports the missing folder or the full disk
        return False
    _in_file.add(descriptor)
    return True


def _point(descriptor: int, file: str | Path, flags: int) -> None:
    opened = os.open(file, flags, 0o644)
    if opened == descriptor:
        os.set_inheritable(descriptor, True)
    else:
        os.dup2(opened, descriptor)
        os.close(opened)


# Signals that ask this process to end: from Ctrl-C, a terminal that vanishes, schedulers and service managers.
#
# All are answered in the same way: a run that has begun finishes its step and writes a checkpoint. Who sends what:
#
#     a person              SIGINT (Ctrl-C), SIGQUIT (Ctrl-backslash), SIGTERM (kill)
#     a terminal, ssh       SIGHUP as it vanishes
#     Slurm                 SIGTERM after SIGCONT; before it what --signal names, mostly SIGUSR1 or SIGUSR2
#     LSF                   SIGINT, 10 s later SIGTERM; at a limit SIGUSR2; what bsub -wa names
#     Grid Engine           with -notify SIGUSR1 or SIGUSR2; at soft limits SIGUSR1, SIGXCPU
#     PBS, HTCondor         SIGTERM; what qsig or kill_sig name, such as SIGQUIT
#     systemd, containers   SIGTERM, and what KillSignal or STOPSIGNAL name; SIGPWR from a container or UPS manager
#     limits, timeouts      SIGXCPU of ulimit -t, each second; timeout -s, SIGALRM
#
# Most senders repeat a signal, seconds or a minute later, before they kill. So only a second Ctrl-C means haste.

ENDS = (
    Signals.SIGINT, Signals.SIGTERM, Signals.SIGHUP, Signals.SIGQUIT, Signals.SIGUSR1, Signals.SIGUSR2,
    Signals.SIGXCPU, Signals.SIGALRM, Signals.SIGPWR,
)  # fmt: skip
# Seconds within which two signals count as one: GNU's timeout sends a signal to the process and again to its group.
TWICE_S = 0.5

Answer = Callable[[Signals], None]


class _State:
    """How this process answers signals. answer: called with each signal. answering: whether that call is under way.
    heard: signals since `interrupting` began. is_command: whether the process is a command and ends with it."""

    def __init__(self) -> None:
        self.answer: Answer = lambda number: None
        self.answering = False
        self.heard: list[Signals] = []
        self.is_command = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.answering:  # a signal that arrives while another is answered asks for the same
            return
        self.answering = True
        try:
            self.heard.append(Signals(number))
            self.answer(Signals(number))
        finally:
            self.answering = False


_STATE = _State()
_OURS = _STATE.hear  # the handler of this module, by which `_answered` tells it from those of others


@contextmanager
def interrupting() -> Iterator[None]:
    """Inside this block the first signal raises KeyboardInterrupt, unless another function of this section changes
    that. At the end the handlers from before are restored; in a command signals are ignored instead, since it has done
    its work."""
    before, answer = {number: signal.getsignal(number) for number in ENDS}, _STATE.answer
    _STATE.heard.clear()
    _answered(Interrupt())
    try:
        yield
    finally:
        if _STATE.is_command:
            end_unheard()
        else:
            _STATE.answer = answer
            for number, handler in before.items():
                if handler not in (None, signal.getsignal(number)):
                    signal.signal(number, handler)


def _answered(answer: Answer, leave: tuple[Signals, ...] = ()) -> None:
    """From now on calls `answer` for each signal of ENDS but those in `leave`, in the main thread between two
    instructions.

    A signal that was ignored when the process started stays ignored: SIGHUP with nohup, SIGINT and SIGQUIT in what a
    script starts in the background. A signal with another handler keeps it, except SIGINT and SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():  # signals belong to the caller's main thread
        return
    _STATE.answer = answer
    for number in ENDS:
        taken = signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler, _OURS)
        other = taken and number not in (Signals.SIGINT, Signals.SIGTERM)
        if number not in leave and not other and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _OURS)


class Haste:
    """Recognises a second Ctrl-C. Two within TWICE_S count as one."""

    def __init__(self) -> None:
        self._first: float | None = None

    def asked(self, number: Signals) -> bool:
        """Whether this signal is a second Ctrl-C; to be called with each signal."""
        if number is not Signals.SIGINT:
            return False
        now = time.monotonic()
        if self._first is None:
            self._first = now
        return now - self._first > TWICE_S


class Interrupt:
    """An answer that raises KeyboardInterrupt at the first signal, and again only at a second Ctrl-C, so that other
    signals do not interrupt the clean-up."""

    def __init__(self) -> None:
        self._begun, self._haste = False, Haste()

    def __call__(self, number: Signals) -> None:
        haste = self._haste.asked(number)
        if not self._begun or haste:
            self._begun = True
            raise KeyboardInterrupt


def end_as_command() -> None:
    """Declares that this process is a command and ends with it. From now on the first signal is passed to the handler
    of Ctrl-C, which inside an event loop is asyncio's."""
    told = False

    def interrupt(number: Signals) -> None:
        nonlocal told
        handler: Any = signal.getsignal(signal.SIGINT)
        if not told:
            told = True
            (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, None)

    _STATE.is_command = True
    # If this process ends at once, Python's resource tracker removes its semaphores, and would print a warning last.
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    _answered(interrupt, leave=(Signals.SIGINT,))


def end_unheard() -> None:
    """From now on signals have no effect, so that the work at the end is not interrupted."""
    _answered(lambda number: None)


def end_by_cancelling(why: str) -> None:
    """From now on the first signal cancels the current task, with `why` as its message. A signal that came before and
    had no effect, as when its exception was raised in a destructor, cancels the task at once."""
    task = asyncio.current_task()
    assert task is not None

    def cancel(number: Signals) -> None:
        if not task.cancelling():
            task.cancel(why)

    _answered(_in_loop(cancel))
    if _STATE.heard:
        cancel(_STATE.heard[0])


def end_by_stopping(stop: asyncio.Event, note: Callable[[str], None]) -> None:
    """From now on the first signal sets `stop` and prints a line with `note`; a second Ctrl-C cancels the current task.
    Further signals have no effect, so that the clean-up is not interrupted."""
    task, haste = asyncio.current_task(), Haste()
    assert task is not None

    def ask(number: Signals) -> None:
        hurry = haste.asked(number)
        if not stop.is_set():
            stop.set()
            by, more = ("", "once more") if number is Signals.SIGINT else (f"{number.name}: ", "Ctrl-C twice")
            note(f"{by}stopping after this step, with a checkpoint; {more} to stop at once")
        elif hurry and not task.cancelling():
            task.cancel()

    _answered(_in_loop(ask))


def _in_loop(answer: Answer) -> Answer:
    """An answer that calls `answer` in the running event loop, which must outlive its use."""
    loop = asyncio.get_running_loop()

    def hand_over(number: Signals) -> None:
        loop.call_soon_threadsafe(answer, number)

    return hand_over
