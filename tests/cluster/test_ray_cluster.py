"""The folder of a private cluster, and whose folders are swept away. How large a private cluster's object store is:
a pure function.
"""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cluster import ray_private
from cluster.errors import WrongInput
from cluster.ray_cluster import GROUPS_BYTES, store_bytes
from cluster.ray_private import RuntimeFolder, root

GONE = 2**22 + 1  # above the largest process id that Linux gives


def test_it_is_closed_to_others_and_goes_whole(tmp_path: Path) -> None:
    folder = RuntimeFolder(tmp_path)
    os.chmod(folder.of_ray, 0o777)  # what Ray does
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.of_ray / "socket").write_text("")
    folder.remove()
    folder.remove()  # a second time does no harm
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_processes_that_are_gone_are_swept(tmp_path: Path) -> None:
    dead, alive, foreign = (tmp_path / name for name in (f"gl-{GONE}-a", f"gl-{os.getpid()}-b", "gl-other-c"))
    for folder in (dead, alive, foreign):
        (folder / "r").mkdir(parents=True)
    RuntimeFolder(tmp_path).remove()
    assert not dead.exists()
    assert alive.exists()
    assert foreign.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("")
    (tmp_path / f"gl-{GONE}-link").symlink_to(precious)
    inside = tmp_path / f"gl-{GONE}-dead"
    inside.mkdir()
    (inside / "link").symlink_to(precious)
    RuntimeFolder(tmp_path).remove()
    assert not inside.exists()
    assert (precious / "file").exists()


def test_a_folder_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = tmp_path / f"gl-{GONE}-x"
    theirs.mkdir()
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    RuntimeFolder(tmp_path).remove()
    assert theirs.exists()


def test_a_run_in_another_container_that_shares_tmp_is_alive_while_it_holds_the_lock(tmp_path: Path) -> None:
    theirs = tmp_path / f"gl-{GONE}-x"  # its process id means nothing here
    theirs.mkdir()
    code = f"import os, fcntl, sys; f = os.open({str(theirs)!r}, 0); fcntl.flock(f, 2); print(flush=True); input()"
    held = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert held.stdout is not None
    held.stdout.readline()
    RuntimeFolder(tmp_path).remove()
    assert theirs.exists()
    held.communicate("\n")
    RuntimeFolder(tmp_path).remove()
    assert not theirs.exists()


def test_it_lies_where_temporary_files_are_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Path(tempfile.mkdtemp(dir="/tmp", prefix="t"))  # tmp_path is too long
    monkeypatch.setenv("TMPDIR", str(link))
    assert root() == link
    folder = RuntimeFolder()
    assert folder.path.parent == link
    folder.remove()
    link.rmdir()
    for unusable in (link, tmp_path):  # gone; too long
        monkeypatch.setenv("TMPDIR", str(unusable))
        assert root() == Path("/tmp")


@pytest.mark.parametrize(("usual", "why"), [("/proc", r"/proc: "), ("/no/such", "/no/such: No such file or directory")])
def test_where_no_folder_can_be_written_it_is_said(usual: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_private, "_USUAL", Path(usual))
    monkeypatch.setenv("TMPDIR", "/a/folder/of/some/job/12345")
    with pytest.raises(WrongInput, match=f"^TMPDIR: .*/12345: has more than 21 bytes, {why}.*; set it to such"):
        root()


# How large a private cluster's object store is: a pure function.

GIB = 2**30


def test_it_has_room_for_two_policies_and_leaves_some_of_shared_memory() -> None:
    assert store_bytes(0, 64 * GIB) == GROUPS_BYTES
    assert store_bytes(16 * GIB, 64 * GIB) == GROUPS_BYTES + 32 * GIB
    assert store_bytes(16 * GIB, 20 * GIB) == 18 * GIB
    assert store_bytes(16 * GIB, 64 * 2**20) == GROUPS_BYTES  # Ray puts it on a disk then, and says so
