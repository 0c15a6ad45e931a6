"""Processes that run somebody else's code: each way to break one has a name, and leaves nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.child import Outcome, Program, forked, nameless, tied, written

ROOT = Path(__file__).parents[2]
PARENT = """
import os, sys, time
from pathlib import Path
from cluster.child import Program, forked, tied
from tests.cluster.test_child import hangs, nothing
folder, kind = sys.argv[1:]
if kind == "fork":
    forked([lambda: hangs(folder)], 600, nothing)
else:
    Program(tied("tests.cluster.test_child", folder), env={**os.environ, "PYTHONPATH": os.getcwd()}).within(600)
"""


def nothing() -> None:
    pass


def hangs(folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(600)


class TwoArguments(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


def raises() -> None:
    raise TwoArguments(1, 2)


def leaves_children(folder: str) -> None:
    """One of its own session, and one of that."""
    if os.fork() == 0:
        os.setsid()
        os.fork()
        hangs(folder)
    hangs(folder)


def held() -> list[str]:
    names = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd") if int(one) > 2]
    return [os.readlink(name) for name in names if os.path.islink(name)]  # not that of the listing


def pids(folder: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while len(found := [int(file.name) for file in folder.iterdir()]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def assert_gone(numbers: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(_lives(pid) for pid in numbers):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("kind", ["fork", "program"])
def test_each_ends_with_the_process_that_started_it(kind: str, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), kind], cwd=ROOT) as parent:
        (pid,) = pids(tmp_path, 1)
        parent.kill()
    assert_gone([pid])


def test_what_becomes_of_a_function_in_a_fork() -> None:
    def writes(what: bytes) -> int:
        os.write(3, what)
        return 1

    def stops() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    before = sorted(os.listdir("/proc/self/fd"))
    found = forked(
        [lambda: ["an answer", None], lambda: time.sleep(600), stops, lambda: os._exit(7), raises, object,
         lambda: writes(b"garbage"), lambda: writes(bytes(1 << 20)), lambda: "x" * (1 << 20)],
        2.0, nothing,
    )  # fmt: skip
    late, killed = Outcome(late=True), Outcome(code=-9)
    assert found[:6] == [Outcome(["an answer", None]), late, late, Outcome(code=7), Outcome(code=1), Outcome(code=1)]
    assert [one._replace(code=-9) for one in found[6:]] == [killed] * 3
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_fork_has_neither_a_lock_nor_a_socket_of_its_parent(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w"), socket.socket():
        (found,) = forked([held], 60, nothing)
    assert len(found.answer) == 1
    assert found.answer[0].startswith("pipe:")


FEW_FILES = """
import os, resource, time
from cluster.child import forked
before = sorted(os.listdir("/proc/self/fd"))
most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(before) + 3, most[1]))
try:
    forked([lambda: time.sleep(600)] * 9, 600, lambda: None)
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_NOFILE, most)
assert sorted(os.listdir("/proc/self/fd")) == before
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("none is left")
"""


def test_where_no_process_can_be_started_none_is_left() -> None:
    told = subprocess.run([sys.executable, "-c", FEW_FILES], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert told.stdout.splitlines() == ["Too many open files", "none is left"], told.stderr


def test_a_program_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    with_tests = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = Program(tied("tests.cluster.test_child", str(tmp_path), "leaves children"), env=with_tests)
    found = pids(tmp_path, 3)
    assert not program.within(0.2)
    program.kill()
    assert program.code() == -9
    assert program.within(10)
    assert_gone(found)
    program.kill()  # changes nothing


def test_a_program_reads_and_writes_more_than_a_pipe_holds() -> None:
    with nameless(b"x" * 10**6) as given, nameless() as output:
        program = Program(
            [sys.executable, "-c", "import sys; sys.stdout.write(sys.stdin.read().upper()); sys.exit(3)"],
            stdin=given, stdout=output,
        )  # fmt: skip
        assert program.within(60)
        assert (program.code(), written(output)) == (3, "X" * 10**6)


if __name__ == "__main__":
    (leaves_children if len(sys.argv) > 2 else hangs)(sys.argv[1])
