"""The process of a command: whose packages it imports, what asks it to end, and standard streams that may be closed."""

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

# Whether another distribution was installed over a package of this project, as pip does without a word: names as plain
# as `rewards` are others' too. Imports the standard library alone.


OURS = "gleaner-rl"


def installed_over(packages: Sequence[str]) -> str:
    """A sentence that names the other distribution, or ''. Of a repository, which pip has not copied, ''."""
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
    """`__init__.py` of each package, where pip has recorded it."""
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


# Where a call of learner.main.main cannot work: where PYTHONPATH has other packages of our names, inside a running
# event loop, in a script without a guard; and how a path is ordered on which files of our names are the user's.


def ours_first() -> None:
    """Folders with a module of our names come last on the path of this process, and so of those that multiprocessing
    starts from here. The user's files there are loaded by their paths (rewards.loader)."""
    sys.path.sort(key=lambda entry: next(theirs(entry), None) is not None)  # in which the others keep their order


def hidden_package() -> str:
    """A sentence if a new process would import a module of somebody else in place of a package of this project, or ''.

    The working directory does not count: no process of a run has it on its path before our packages.
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
    """A sentence if the present call comes from where a run cannot be started, or ''."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _unguarded()
    return (
        "main() runs an event loop of its own and cannot be called inside one, as in a notebook; call "
        "learner.train(config=FILE), which starts a process"
    )


def _unguarded() -> str:
    """The processes of the reward functions import the main script again: its call of main() must then not run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__main__"):
        frame = frame.f_back
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if frame is None or script is None or frame.f_globals.get("__spec__") is not None:  # `python -m` imports a name
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


# Standard input, output and error that may be closed, or lose who reads them: `gleaner train ... | head`, a dead tee,
# a terminal that vanishes, a disk behind `>` that fills, `>&-`. It costs a run nothing but what was to be read.
#
# A descriptor that is closed becomes /dev/null, before a file of the run's could be opened under its number and be
# written into. One that cannot be written any more becomes the file that `kept_in` names, or /dev/null before that; so
# does what libraries, threads and later child processes write to it. Loads the standard library alone.

CONSOLE = "console.log"  # in a run's folder: what was printed after those who read it had gone

_kept: Path | None = None
_in_file: set[int] = set()  # descriptors that are that file now
_lost: dict[int, OSError] = {}  # descriptor -> why what was written to it is nowhere
_commentary = False
_originals: list[Any] = []  # streams that were replaced: as one goes, it closes its descriptor


class _Lasting(io.FileIO):
    """A descriptor to which writing never fails."""

    def write(self, data: Any) -> int:
        """All of it."""
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            try:
                count = super().write(left)
            except OSError as error:
                _replace(self.fileno(), error)
                continue
            if count is None:  # somebody has set O_NONBLOCK, as programs do that share a terminal with this one
                writable = select.poll()
                writable.register(self.fileno(), select.POLLOUT)
                writable.poll()
            left = left[count or 0 :]
        return size


def keep_streams() -> None:
    """From here on they last. Streams that somebody has put in the place of this process's own are left alone."""
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
    if own is None:  # it was closed
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    own.flush()
    _originals.append(own)
    unbuffered = isinstance(own.buffer, io.FileIO)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        own.encoding, own.errors, line_buffering=own.line_buffering, write_through=own.write_through,
    )  # fmt: skip


def streams_kept_in(file: Path) -> None:
    """What cannot be written where it should go is added to this file, which is made as soon as there is such."""
    global _kept
    _kept = file
    for descriptor in list(_lost):
        if _to_file(descriptor):
            del _lost[descriptor]


def streams_are_commentary() -> None:
    """What this process prints is not what it is for: `outcome` says nothing of its loss."""
    global _commentary
    _commentary = True


def streams_outcome(code: int) -> int:
    """The exit code of a process that comes to its end with `code`: 1 instead of 0 where something of its standard
    output could not be written, with a sentence. A reader that went away has what it wanted."""
    sys.stdout.flush()
    error = _lost.get(1)
    if error is None or _commentary or error.errno == errno.EPIPE:
        return code
    print(f"error: standard output could not be written ({error.strerror}); send it elsewhere", file=sys.stderr)
    return code or 1


def _replace(descriptor: int, error: OSError) -> None:
    """After `error`, which the last write to it has met."""
    if _kept is None or descriptor in {*_in_file, *_lost} or not _to_file(descriptor):
        _lost.setdefault(descriptor, error)
        _point(descriptor, os.devnull, os.O_WRONLY)


def _to_file(descriptor: int) -> bool:
    assert _kept is not None
    try:
        _point(descriptor, _kept, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW)
    except OSError:  # the run says of its other files that their folder is gone, or the disk full
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


# What asks this process to end: Ctrl-C, a terminal that vanishes, and whatever schedulers and service managers send.
#
# They all ask for the same, as well as the process can end: a run that has begun finishes its step and writes a
# checkpoint. Who sends what:
#
#     a person              SIGINT (Ctrl-C), SIGQUIT (Ctrl-backslash), SIGTERM (kill)
#     a terminal, ssh       SIGHUP as it vanishes
#     Slurm                 SIGTERM after SIGCONT; before it what --signal names, mostly SIGUSR1 or SIGUSR2
#     LSF                   SIGINT, 10 s later SIGTERM; at a limit SIGUSR2; what bsub -wa names
#     Grid Engine           with -notify SIGUSR1 or SIGUSR2; at soft limits SIGUSR1, SIGXCPU
#     PBS, HTCondor         SIGTERM; what qsig or kill_sig name, such as SIGQUIT
#     systemd, containers   SIGTERM, and what KillSignal or STOPSIGNAL name; SIGPWR from who manages a container or a
#     UPS
#     limits, timeouts      SIGXCPU of ulimit -t, each second; timeout -s, SIGALRM
#
# Most of them send several, a minute or seconds apart, before they kill: so only a second Ctrl-C asks for haste.

ENDS = (
    Signals.SIGINT, Signals.SIGTERM, Signals.SIGHUP, Signals.SIGQUIT, Signals.SIGUSR1, Signals.SIGUSR2,
    Signals.SIGXCPU, Signals.SIGALRM, Signals.SIGPWR,
)  # fmt: skip
TWICE_S = 0.5  # between two signals that count as one: GNU's timeout sends its own to the process and to its group

Answer = Callable[[Signals], None]


class _State:
    """Of this process: how a request is answered now, which came since `interrupting`, and whether it is a command's
    and nobody else's."""

    def __init__(self) -> None:
        self.answer: Answer = lambda number: None
        self.answering = False
        self.heard: list[Signals] = []
        self.is_command = False

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The handler of signals."""
        if self.answering:  # one that comes within another asks for the same
            return
        self.answering = True
        try:
            self.heard.append(Signals(number))
            self.answer(Signals(number))
        finally:
            self.answering = False


_STATE = _State()
_OURS = _STATE.hear  # one object, by which it is known again


@contextmanager
def interrupting() -> Iterator[None]:
    """Inside this block the first request is a KeyboardInterrupt, until something else is said; afterwards all is as it
    was, and of a `command` none is heard, since it has done what it was to do."""
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
    """From now on each of ENDS, but for those in `leave`, is answered so, in the main thread between two instructions.

    One that was ignored when the process started stays so: of nohup SIGHUP, of what a script starts in the background
    SIGINT and SIGQUIT. One that somebody else answers stays his, but for Ctrl-C and SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():  # a caller's, to whom signals belong
        return
    _STATE.answer = answer
    for number in ENDS:
        taken = signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler, _OURS)
        other = taken and number not in (Signals.SIGINT, Signals.SIGTERM)
        if number not in leave and not other and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _OURS)


class Haste:
    """Which requests are a second Ctrl-C. Two within TWICE_S are one."""

    def __init__(self) -> None:
        self._first: float | None = None

    def asked(self, number: Signals) -> bool:
        """To be told of each request."""
        if number is not Signals.SIGINT:
            return False
        now = time.monotonic()
        if self._first is None:
            self._first = now
        return now - self._first > TWICE_S


class Interrupt:
    """An answer: a KeyboardInterrupt, but not out of the clean-up after the first one, unless in haste."""

    def __init__(self) -> None:
        self._begun, self._haste = False, Haste()

    def __call__(self, number: Signals) -> None:
        haste = self._haste.asked(number)
        if not self._begun or haste:
            self._begun = True
            raise KeyboardInterrupt


def end_as_command() -> None:
    """This process is a command, and ends with it. From now on the first request is what Ctrl-C is: whoever handles
    that, asyncio in an event loop, does so."""
    told = False

    def interrupt(number: Signals) -> None:
        nonlocal told
        handler: Any = signal.getsignal(signal.SIGINT)
        if not told:
            told = True
            (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, None)

    _STATE.is_command = True
    # Python's process that removes what one has left that ends at once, semaphores, would warn of it behind our words.
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    _answered(interrupt, leave=(Signals.SIGINT,))


def end_unheard() -> None:
    """From now on they change nothing: what is done at the end must not be cut short."""
    _answered(lambda number: None)


def end_by_cancelling(why: str) -> None:
    """From now on the first request cancels the current task, with these words; so does one that came before and was
    lost, as an exception is in a destructor."""
    task = asyncio.current_task()
    assert task is not None

    def cancel(number: Signals) -> None:
        if not task.cancelling():
            task.cancel(why)

    _answered(_in_loop(cancel))
    if _STATE.heard:
        cancel(_STATE.heard[0])


def end_by_stopping(stop: asyncio.Event, note: Callable[[str], None]) -> None:
    """From now on the first request sets `stop`, and is noted; a second Ctrl-C cancels the current task. Further ones
    are not heard: the clean-up must not be cut short."""
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
    """The same, in the running event loop, which goes on longer than this is the answer."""
    loop = asyncio.get_running_loop()

    def hand_over(number: Signals) -> None:
        loop.call_soon_threadsafe(answer, number)

    return hand_over
