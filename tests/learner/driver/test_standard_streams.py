"""A process whose standard streams are closed, or lose who reads them, and what is left of its words."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

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
