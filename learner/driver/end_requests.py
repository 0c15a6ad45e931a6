"""What asks this process to end: Ctrl-C, a terminal that vanishes, and whatever schedulers and service managers send.

They all ask for the same, as well as the process can end: a run that has begun finishes its step and writes a
checkpoint. Who sends what:

    a person              SIGINT (Ctrl-C), SIGQUIT (Ctrl-backslash), SIGTERM (kill)
    a terminal, ssh       SIGHUP as it vanishes
    Slurm                 SIGTERM after SIGCONT; before it what --signal names, mostly SIGUSR1 or SIGUSR2
    LSF                   SIGINT, 10 s later SIGTERM; at a limit SIGUSR2; what bsub -wa names
    Grid Engine           with -notify SIGUSR1 or SIGUSR2; at soft limits SIGUSR1, SIGXCPU
    PBS, HTCondor         SIGTERM; what qsig or kill_sig name, such as SIGQUIT
    systemd, containers   SIGTERM, and what KillSignal or STOPSIGNAL name; SIGPWR from who manages a container or a UPS
    limits, timeouts      SIGXCPU of ulimit -t, each second; timeout -s, SIGALRM

Most of them send several, a minute or seconds apart, before they kill: so only a second Ctrl-C asks for haste.
"""

import asyncio
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import Signals
from types import FrameType
from typing import Any

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
            unheard()
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


def command() -> None:
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


def unheard() -> None:
    """From now on they change nothing: what is done at the end must not be cut short."""
    _answered(lambda number: None)


def cancelled(why: str) -> None:
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


def stopped(stop: asyncio.Event, note: Callable[[str], None]) -> None:
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
