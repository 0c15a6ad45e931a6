"""A process that is asked to end, by whatever and whenever: each request in its place, and none that costs the step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from signal import Signals
from typing import IO

import pytest

from learner.config import load
from learner.driver.process import ENDS
from learner.main import main
from tests.flow.run import wait_until

# Says where it is, and goes on when it reads a line. Its arguments: how far two signals are apart that count as one,
# what it is, and how many signals it hears before it finishes the step.
PROCESS = """
import asyncio, signal, sys, time
from learner.driver import process

def say(words):
    print(words, flush=True)

def told():
    return sys.stdin.readline().strip()

async def run():
    for line in ["begun", "connected"]:
        say(line)
        told()
        await asyncio.sleep(0)
        if line == "begun":
            process.end_by_cancelling("before the run began")
    stop = asyncio.Event()
    process.end_by_stopping(stop, say)
    say("training")
    await stop.wait()
    while len(process._STATE.heard) < int(sys.argv[3]):
        await asyncio.sleep(0.01)
    say("finishing the step")
    await asyncio.to_thread(told)
    process.end_unheard()
    say("closing")
    told()
    return "done"

class Swallows:
    def __del__(self):
        say("in a destructor")
        told()

def main():
    try:
        with process.interrupting():
            try:
                said = sys.argv[2]
                if said == "swallowed":
                    Swallows()
                say(asyncio.run(run()))
            except KeyboardInterrupt:
                say("cleaning up")
                told()
                raise
    except KeyboardInterrupt:
        say("interrupted")
    except asyncio.CancelledError as error:
        say(f"cancelled {error.args}")
    say("ended")
    told()

process.TWICE_S = float(sys.argv[1])
if sys.argv[2] == "a command":
    process.end_as_command()
main()
"""


class Process:
    """Of PROCESS."""

    def __init__(self, process: subprocess.Popen[str], into: IO[str], out: IO[str]) -> None:
        self.process, self._into, self._out = process, into, out

    def send(self, *numbers: Signals) -> None:
        for number in numbers:
            self.process.send_signal(number)

    def goes_on(self) -> None:
        self._into.write("\n")
        self._into.flush()

    def until(self, words: str) -> list[str]:
        """What it says before that, as soon as it is said."""
        said: list[str] = []
        while (line := self._out.readline()) != f"{words}\n":
            assert line, f"it ended with {self.process.wait()} and said {said} before {words}"
            said.append(line.strip())
        return said

    def until_training(self) -> None:
        for place in ("begun", "connected"):
            self.until(place)
            self.goes_on()
        self.until("training")

    def left(self) -> int:
        self._into.close()
        return self.process.wait(timeout=30)


def ignoring(numbers: Sequence[Signals]) -> None:
    """In the child, as a shell starts it: nothing is ignored but these."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN if number in numbers else signal.SIG_DFL)


@contextmanager
def started(twice_s: float = 0.0, how: str = "", ignored: Sequence[Signals] = (), heard: int = 1) -> Iterator[Process]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(twice_s), how, str(heard)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=partial(ignoring, ignored), start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        try:
            yield Process(process, process.stdin, process.stdout)
        finally:
            process.kill()
            process.wait()


LEFT = """
import multiprocessing, os
from multiprocessing import shared_memory
from learner.driver import process
process.end_as_command()
locks = [multiprocessing.get_context("spawn").Semaphore(), multiprocessing.get_context("forkserver").Lock()]
block = shared_memory.SharedMemory(create=True, size=64)
print(*("sem." + lock._semlock.name.strip("/") for lock in locks), block.name, flush=True)
os._exit(3)
"""


def test_nothing_is_said_behind_the_last_word_of_a_command_that_ends_at_once() -> None:
    """Of semaphores and shared memory, which go all the same."""
    ended = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")
    names = set(ended.stdout.split())
    assert len(names) == 3
    wait_until(lambda: names.isdisjoint(os.listdir("/dev/shm")), "what it has left to go")


INT, TERM, HUP, USR1 = Signals.SIGINT, Signals.SIGTERM, Signals.SIGHUP, Signals.SIGUSR1


@pytest.mark.parametrize("number", ENDS)
def test_each_lets_the_step_be_finished_and_nothing_cuts_the_end_short(number: Signals) -> None:
    with started(how="a command") as run:
        run.until_training()
        run.send(number)
        (note,) = run.until("finishing the step")
        assert "stopping after this step, with a checkpoint" in note
        assert (number.name in note) == (number is not INT)  # who has pressed Ctrl-C knows it
        run.goes_on()
        run.until("closing")
        run.send(number, INT, TERM, HUP)
        run.goes_on()
        assert run.until("ended") == ["done"]
        run.send(number, INT, TERM, HUP)
        assert run.left() == 0


@pytest.mark.parametrize(
    "asked",
    [
        (USR1, TERM, TERM),  # Slurm's warning, its end, and that of a scancel by hand
        (INT, TERM),  # LSF
        (TERM, INT),
        (Signals.SIGXCPU,) * 4,  # each second once the limit is reached
        (HUP, Signals.SIGCONT, TERM),  # a shell that ends with a stopped job
    ],
)
def test_several_are_one_request(asked: tuple[Signals, ...]) -> None:
    with started() as run:
        run.until_training()
        for number in asked:
            run.send(number)
        assert len(run.until("finishing the step")) == 1
        run.goes_on()
        run.until("closing")
        run.goes_on()
        assert run.until("ended") == ["done"]


@pytest.mark.parametrize("before", [(), (TERM, HUP)])
def test_a_second_ctrl_c_is_in_haste(before: tuple[Signals, ...]) -> None:
    with started(heard=len(before) + 1) as run:  # two of one number that wait to be heard are one
        run.until_training()
        run.send(*before, INT)
        run.until("finishing the step")
        run.send(INT)
        run.goes_on()  # a thread waits for it, as for a file that is being written
        assert run.until("ended") == ["cancelled ()"]


def test_two_at_once_are_one() -> None:
    """GNU's timeout sends its own to the process and to its group."""
    with started(twice_s=3600) as run:
        run.until_training()
        run.send(INT, INT, INT)
        run.until("finishing the step")
        run.send(INT)
        run.goes_on()
        run.until("closing")
        run.goes_on()
        assert run.until("ended") == ["done"]


def test_before_the_run_has_begun_they_end_it() -> None:
    for place, said in {"begun": "interrupted", "connected": "cancelled ('before the run began',)"}.items():
        with started() as run:
            for here in ("begun", "connected"):
                run.until(here)
                if here == place:
                    break
                run.goes_on()
            run.send(USR1)
            if said == "interrupted":
                run.until("cleaning up")
                run.send(TERM, HUP)  # which do not cut it short
                run.goes_on()
            else:
                run.goes_on()
            assert run.until("ended") == [said]


def test_one_that_python_loses_is_not_lost() -> None:
    """An exception in a destructor ends nothing; Ray has many of them."""
    with started(how="swallowed") as run:
        run.until("in a destructor")
        run.send(TERM)
        for place in ("begun", "connected"):
            run.until(place)
            run.goes_on()
        assert run.until("ended") == ["cancelled ('before the run began',)"]


@pytest.mark.parametrize("ignored", [(HUP,), (INT, Signals.SIGQUIT), (USR1, HUP, INT)])
def test_what_was_ignored_stays_so(ignored: tuple[Signals, ...]) -> None:
    """nohup, what a script starts in the background, and both."""
    with started(ignored=ignored) as run:
        run.until("begun")
        run.send(*ignored)
        run.goes_on()
        run.until("connected")
        run.send(*ignored)
        run.goes_on()
        run.until("training")
        run.send(*ignored, TERM)
        (note,) = run.until("finishing the step")
        assert note.startswith("SIGTERM: ")
        run.send(*ignored, *ignored)
        run.goes_on()
        run.until("closing")
        run.goes_on()
        assert run.until("ended") == ["done"]
        run.send(*ignored)
        assert run.left() == 0


def test_others_do_not_disturb() -> None:
    others = (Signals.SIGCONT, Signals.SIGWINCH, Signals.SIGCHLD, Signals.SIGPIPE, Signals.SIGURG, Signals.SIGSTOP)
    with started() as run:
        run.until_training()
        run.send(*others, Signals.SIGCONT, TERM)
        (note,) = run.until("finishing the step")
        assert note.startswith("SIGTERM: ")


def test_a_caller_gets_its_handlers_back() -> None:
    """main() of learner.main in a script of somebody's: what comes afterwards is the script's."""
    with started() as run:
        run.until_training()
        run.send(TERM)
        for place in ("finishing the step", "closing", "ended"):
            run.until(place)
            if place != "ended":
                run.goes_on()
        run.send(TERM)
        assert run.process.wait(timeout=30) == -TERM


@pytest.mark.parametrize("number", [HUP, USR1, TERM])
def test_one_in_the_first_second_ends_a_command_with_a_sentence(
    number: Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration's classes are being imported."""

    def asked_meanwhile() -> str:
        os.kill(os.getpid(), number)
        return ""

    monkeypatch.setattr(load, "describe", asked_meanwhile)
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert main(["--keys"]) == 130
    finally:
        signal.signal(number, before)
    assert capsys.readouterr().err == "stopped before the run began\n"
