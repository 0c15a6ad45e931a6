"""A process that is asked to end, by whatever and whenever: each request in its place, and none that costs the step.
A call that cannot work says why: somebody else's packages on PYTHONPATH, a running event loop, a script without a
guard. A process whose standard streams are closed, or lose who reads them, and what is left of its words.
"""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from signal import Signals
from typing import IO, Any

import pytest

from cluster.own_path import ROOT
from learner.config import load
from learner.driver.process import ENDS, hidden_package, ours_first
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


# A call that cannot work says why: somebody else's packages on PYTHONPATH, a running event loop, a script without a
# guard.


@pytest.mark.parametrize("file", ["cluster.py", "rewards/__init__.py"])
def test_another_module_of_our_name_that_new_processes_would_import(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    (tmp_path / "data" / "cluster").mkdir(parents=True)
    (tmp_path / "rewards").mkdir()  # a folder without __init__.py hides nothing
    assert hidden_package() == ""
    (tmp_path / file).write_text("")
    assert main(["model.path=x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = file.split("/")[0].removesuffix(".py")
    assert line.startswith(f"error: PYTHONPATH: {tmp_path / file} hides gleaner's package {name} (in {ROOT}) ")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    assert hidden_package() == ""


@pytest.mark.parametrize("entry", ["", "given"])
def test_folders_with_modules_of_our_names_come_last(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path) if entry else ""
    monkeypatch.setattr(sys, "path", [folder, "other", str(ROOT)])
    ours_first()
    assert sys.path == [folder, "other", str(ROOT)]
    Path("rewards.py").write_text("")
    ours_first()
    assert sys.path == ["other", str(ROOT), folder]


def test_a_call_in_a_running_event_loop(capsys: pytest.CaptureFixture[str]) -> None:
    async def notebook() -> int:
        return main(["model.path=x"])

    assert asyncio.run(notebook()) == 2
    assert "error: main() runs an event loop of its own and cannot be called inside one" in capsys.readouterr().err


CALL = "from learner.main import main\n"
FUNCTION = "def go():\n    print(main(['bogus=1']))\n"
GUARD = "if __name__ == '__main__':\n"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (f"{CALL}print(main(['bogus=1']))\n", "line 2: main() starts processes that import this script again"),
        (f"{CALL}if True:\n    print(main(['bogus=1']))\n", "line 3: main() starts processes"),
        (f"{CALL}{FUNCTION}go()\n", "line 4: main() starts processes"),
        (f"{CALL}{GUARD}    print(main(['bogus=1']))\n", "config: bogus"),
        (f"{CALL}{FUNCTION}{GUARD}    go()\n", "config: bogus"),
    ],
)
def test_a_script_without_a_guard(script: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    words = [sys.executable, "mine.py"]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert told in ran.stderr
    assert ran.stdout.split() == ["2"]


# A process whose standard streams are closed, or lose who reads them, and what is left of its words.

# Says something three times: before it is known where lost words are kept, and twice afterwards, the last time by a
# child. Opens a file first, which must not get a standard descriptor's number.
SPEAKER = """
import os, subprocess, sys
from learner.driver import process
process.keep_streams()
with open(sys.argv[1] + "/other", "w") as other:
    for place, when in enumerate(("early", "late", "by a child")):
        if place == 1:
            process.streams_kept_in(__import__("pathlib").Path(sys.argv[1], sys.argv[2]))
        for number, stream in ((1, sys.stdout), (2, sys.stderr)):
            words = f"{number} {when} " + "x" * int(sys.argv[3])
            print(words, file=stream, flush=True) if place < 2 else subprocess.run(["echo", words], stdout=number)
    other.write(f"{other.fileno()} {sys.stdin is None or sys.stdin.read()}")
code = process.streams_outcome(int(sys.argv[4]))
with open(sys.argv[1] + "/code", "w") as file:
    file.write(str(code))
os._exit(code)
"""


@contextmanager
def full() -> Iterator[int]:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@contextmanager
def read_by_nobody() -> Iterator[int]:
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@contextmanager
def vanished_terminal() -> Iterator[int]:
    ours, theirs = pty.openpty()
    os.close(ours)
    yield theirs
    os.close(theirs)


def speak(folder: Path, code: int = 0, kept: str = "console.log", long: int = 1, **streams: int) -> str:
    """Its exit code is `code`, which it is after its last word. What it has said to the streams that are pipes."""
    command = [sys.executable, "-c", SPEAKER, str(folder), kept, str(long), str(code)]
    given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, text=True, timeout=60, check=False, **given | streams)
    assert done.returncode == int((folder / "code").read_text())
    assert int((folder / "other").read_text().split()[0]) > 2
    return f"{done.returncode}\n{done.stdout or ''}"


@pytest.mark.parametrize("lost", [full, read_by_nobody, vanished_terminal])
@pytest.mark.parametrize("long", [1, 20_000])
def test_what_is_lost_goes_on_in_a_file(
    tmp_path: Path, lost: Callable[[], AbstractContextManager[int]], long: int
) -> None:
    with lost() as descriptor:
        code, *said = speak(tmp_path, long=long, stdout=descriptor, stderr=descriptor).splitlines()
    assert (code, said) == ("0", [])
    kept = [line.rstrip("x") for line in (tmp_path / "console.log").read_text().splitlines()]
    assert kept == ["1 late ", "2 late ", "1 by a child ", "2 by a child "]


def test_of_two_streams_each_goes_its_own_way(tmp_path: Path) -> None:
    with read_by_nobody() as descriptor:
        said = speak(tmp_path, stdout=descriptor, stderr=subprocess.PIPE)
    assert said == "0\n"
    assert (tmp_path / "console.log").read_text() == "1 late x\n1 by a child x\n"


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_closed_streams_cost_nothing(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """Nobody wants to read what is said there, so it is kept nowhere."""
    words = [sys.executable, "-c", SPEAKER, str(tmp_path), "console.log", "1", "0"]
    shell = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    done = subprocess.run(["sh", "-c", f'exec "$@" {shell}', "sh", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == int((tmp_path / "code").read_text()) == 0
    number, rest = (tmp_path / "other").read_text().split(" ")
    assert (int(number) > 2, rest) == (True, "True" if 0 in closed else "")
    assert done.stdout == ("" if 1 in closed else "1 early x\n1 late x\n1 by a child x\n")
    assert not (tmp_path / "console.log").exists()


def test_a_disk_that_is_full_for_the_file_too_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    (tmp_path / "folder").mkdir()
    for kept in ("/dev/full", "full", "folder", "not/there"):
        with full() as descriptor:
            assert speak(tmp_path, kept=kept, stdout=descriptor, stderr=descriptor) == "1\n"


def test_a_command_whose_words_are_its_result_says_that_they_are_lost(tmp_path: Path) -> None:
    told = "error: standard output could not be written (No space left on device); send it elsewhere\n"
    program = (
        "import os\nfrom learner.driver import process\nprocess.keep_streams()\nprint('x' * 9)\n"
        "os._exit(process.streams_outcome({}))"
    )

    def ended(code: int, stdout: int, program: str = program) -> tuple[int, str]:
        command = [sys.executable, "-c", program.format(code)]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
        return done.returncode, done.stderr

    with full() as descriptor:
        assert [ended(code, descriptor) for code in (0, 1, 2)] == [(1, told), (1, told), (2, told)]
        assert ended(0, descriptor, program.replace("print", "process.streams_are_commentary()\nprint")) == (0, "")
    with read_by_nobody() as descriptor:
        assert [ended(code, descriptor) for code in (0, 2)] == [(0, ""), (2, "")]


def test_a_pipe_that_somebody_has_set_not_to_block_gets_all_of_it() -> None:
    """As ssh and node set the terminal that they share: a full pipe is then an error to Python."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    program = (
        "from learner.driver import process\nprocess.keep_streams()\nprint('y' * 10**6)\n"
        "exit(process.streams_outcome(0))"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=writing)
    os.close(writing)
    read: list[bytes] = []
    with os.fdopen(reading, "rb") as stream:
        reader = threading.Thread(target=lambda: read.append(stream.read()))
        reader.start()
        assert child.wait(timeout=60) == 0
        reader.join(timeout=60)
    assert read == [b"y" * 10**6 + b"\n"]
