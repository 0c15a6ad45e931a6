"""What a row of a GPU benchmark leaves behind when it does not end well: its words, and no process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.gpu.rows import Found, Row, run_all

MODULE = """
import subprocess, sys
if "long" in sys.argv:
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    child.wait()
raise SystemExit("no card")
"""


def _nothing(device: str) -> Found:
    return {}  # what is run is the module


def test_words_of_a_failed_row_are_kept_and_a_row_cut_off_takes_what_it_started_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_row.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = tmp_path / "results"

    found = run_all("a_row", [Row("bad", _nothing), Row("long", _nothing)], folder, [], minutes=0.08)

    assert found["bad"]["status"] == "failed"
    assert found["bad"]["error"] == ["no card"]
    assert "long" not in found
    started = int((folder / "long.log").read_text())
    end = time.monotonic() + 10
    while Path(f"/proc/{started}").exists() and "Z" not in Path(f"/proc/{started}/stat").read_text().split()[2]:
        assert time.monotonic() < end, f"process {started} goes on"
        time.sleep(0.05)
    assert (folder / "bad.log").read_text() == "no card\n"
