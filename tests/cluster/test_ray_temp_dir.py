"""The folder of a private cluster, and whose folders are swept away."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.ray_temp_dir import RuntimeFolder

GONE = 2**22 + 1  # above the largest process id that Linux gives


def test_it_is_closed_to_others_and_goes_whole(tmp_path: Path) -> None:
    folder = RuntimeFolder(tmp_path)
    os.chmod(folder.ray, 0o777)  # what Ray does
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.ray / "socket").write_text("")
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
