"""Files that others have filled: folders of any depth, and file systems that are full of what."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

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
