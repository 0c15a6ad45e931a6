"""Files that others have filled: folders of any depth, and file systems that are full of what. One writer per run
folder: who comes second is told who is first, and a killed one leaves nothing in the way.
"""

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cluster import files
from cluster.errors import WrongInput
from cluster.files import lacks, wipe

MEMORY = Path("/dev/shm")  # where a thousand folders take no time


def test_a_folder_is_removed_however_deep_and_closed_and_nothing_beside_it(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("here")
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as above:
        folder = Path(above) / "one"
        folder.mkdir()
        (folder / "link").symlink_to(tmp_path)
        (folder / "file").symlink_to(kept)
        os.mkfifo(folder / "fifo")
        (folder / "closed" / "in").mkdir(parents=True)
        (folder / "closed").chmod(0)
        before = os.open(".", os.O_PATH)
        os.chdir(folder)
        try:
            for _ in range(2100):  # deeper than Python's stack, and than a path may be long
                os.mkdir("d")
                os.chdir("d")
        finally:
            os.fchdir(before)
            os.close(before)
        wipe(folder)
        assert os.listdir(above) == []
    assert kept.read_text() == "here"


def test_a_link_in_the_place_of_a_folder_is_removed_and_what_it_leads_to_is_not(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "folder"
    (home / "deep").mkdir(parents=True)
    (home / "letter").touch()
    folder.symlink_to(home)
    wipe(folder)
    wipe(folder)  # which is there no more
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "home", "letter"]
    (home / "deep").rename(folder)
    wipe(folder)
    assert [path.name for path in home.iterdir()] == ["letter"]


FILLED = """
import ctypes, os, sys
from pathlib import Path
from cluster.files import lacks
libc = ctypes.CDLL(None, use_errno=True)
folder, options = (argument.encode() for argument in sys.argv[1:])
ids = (("uid_map", f"0 {os.getuid()} 1"), ("setgroups", "deny"), ("gid_map", f"0 {os.getgid()} 1"))
if libc.unshare(0x10000000 | 0x20000) != 0:
    sys.exit(77)
for name, text in ids:
    Path("/proc/self", name).write_text(text)
if libc.mount(b"none", folder, b"tmpfs", 0, options) != 0:
    sys.exit(77)
try:
    for i in range(100):
        Path(sys.argv[1], str(i)).write_bytes(bytes(100_000))
except OSError as error:
    print(lacks(error))
"""


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            "nr_inodes=9,size=8m",
            "no inode is left for another file, though 7 MiB are free: delete files, many small",
        ),
        ("nr_inodes=99,size=256k", "No space left on device"),
    ],
)
def test_what_a_full_file_system_lacks_is_said(options: str, told: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FILLED, str(tmp_path), options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    if done.returncode == 77:
        pytest.skip("this kernel gives no namespace in which a small file system could be mounted")
    assert (done.stdout.strip(), done.stderr) == (told, "")


def test_other_errors_are_said_as_the_kernel_does(tmp_path: Path) -> None:
    assert lacks(OSError(errno.EACCES, "Permission denied", str(tmp_path))) == "Permission denied"
    assert lacks(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"
    assert lacks(OSError("odd")) == "odd"


# One writer per run folder: who comes second is told who is first, and a killed one leaves nothing in the way.

HOLD = """
import pathlib, sys, time
from cluster import files
with files.lock_held(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
COPY = """
import os, sys, time
from pathlib import Path
from cluster.files import lock_held
from rollout.data.chat import fails_within
def hang():
    print(os.getpid(), flush=True)
    time.sleep(600)
with lock_held(Path(sys.argv[1])):
    fails_within(600, hang)
"""
RACE = """
import pathlib, sys
from cluster import files
from cluster.errors import WrongInput
folder, inside = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
for _ in range(200):
    try:
        with files.lock_held(folder):
            inside.mkdir()  # fails if another is in
            inside.rmdir()
    except WrongInput:
        pass
print("whole")
"""


def test_the_second_is_told_who_is_first_and_a_kill_frees_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    owner = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "held\n"
    who = rf"in use by process {owner.pid} on host {re.escape(socket.gethostname())} since 20\d\d-.*give .* name="
    with pytest.raises(WrongInput, match=who), files.lock_held(folder):
        pytest.fail("two writers")
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert (folder / files.LOCK_FILE).exists()
    with files.lock_held(folder):
        assert str(os.getpid()) in (folder / files.LOCK_FILE).read_text()
    assert list(folder.iterdir()) == []


def test_a_run_that_left_nothing_leaves_no_folder(tmp_path: Path) -> None:
    with files.lock_held(tmp_path / "runs" / "one"):
        pass
    assert list(tmp_path.iterdir()) == []
    with files.lock_held(tmp_path / "runs" / "two"):
        (tmp_path / "runs" / "two" / "metrics.jsonl").touch()
    assert [path.name for path in (tmp_path / "runs" / "two").iterdir()] == ["metrics.jsonl"]


def test_the_lock_of_another_writer_survives_the_end_of_one_whose_folder_was_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    with files.lock_held(folder):
        folder.rename(tmp_path / "away")
        with files.lock_held(folder):
            mine = (folder / files.LOCK_FILE).read_text()
            (tmp_path / "away").rename(tmp_path / "further")
        folder.mkdir()
        (folder / files.LOCK_FILE).write_text(mine)
    assert (folder / files.LOCK_FILE).read_text() == mine


def test_a_lock_on_a_file_that_its_owner_has_just_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, ended = fcntl.flock, [tmp_path / files.LOCK_FILE]

    def late(descriptor: int, how: int) -> None:
        if ended:
            ended.pop().unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with files.lock_held(tmp_path), pytest.raises(WrongInput), files.lock_held(tmp_path):
        pytest.fail("two writers")


def test_lock_and_folder_come_and_go_under_many_hands_and_never_two_are_inside(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RACE, str(tmp_path / "runs" / "one"), str(tmp_path / "inside")]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [racer.communicate(timeout=60)[0] for racer in racers] == ["whole\n"] * 3


@pytest.mark.parametrize("instead", [None, "", "mine"])
def test_a_lock_file_that_was_deleted_under_a_run_lets_nobody_in(instead: str | None, tmp_path: Path) -> None:
    told = r"output_dir: a run folder has one writer, and .* is in use by a process .* whose \.lock was deleted"
    with files.lock_held(tmp_path):
        (tmp_path / files.LOCK_FILE).unlink()
        if instead is not None:
            (tmp_path / files.LOCK_FILE).write_text(instead)
        with pytest.raises(WrongInput, match=told), files.lock_held(tmp_path):
            pytest.fail("two writers")
    with files.lock_held(tmp_path):
        pass


def test_a_link_to_a_disk_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "not-mounted")
    with pytest.raises(FileExistsError, match="runs"), files.lock_held(tmp_path / "runs" / "one"):
        pytest.fail("there is no such folder")


def test_a_file_system_that_makes_no_folders_is_an_error() -> None:
    with pytest.raises(OSError, match="/proc/no"), files.lock_held(Path("/proc/no/run")):
        pytest.fail("there is no such folder")


def test_a_killed_process_leaves_no_copy_that_holds_its_lock(tmp_path: Path) -> None:
    copying = [sys.executable, "-c", COPY, str(tmp_path)]
    with subprocess.Popen(copying, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        copy = Path("/proc") / owner.stdout.readline().strip()
        owner.kill()
    deadline = time.monotonic() + 30
    while copy.exists():
        assert time.monotonic() < deadline, "it goes on without the process that would have ended it"
        time.sleep(0.01)
    with files.lock_held(tmp_path):
        pass
