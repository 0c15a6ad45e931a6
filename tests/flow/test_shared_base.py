"""The demo on one base for both roles: it learns as it does on two, and goes on when the base's owner is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.flow.run import environment

ROOT = Path(__file__).parents[2]


def pids(marker: str, name: str) -> list[int]:
    """Of the run's processes of that role."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                marker.encode() in (folder / "environ").read_bytes()
                and f"ray::{name}" in (folder / "cmdline").read_text()
            ):
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked
    return found


def mapped(pid: int) -> list[str]:
    """How the process maps a generator's base: permissions of each mapping."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if "gleaner-base" in line]


@pytest.mark.timeout(400)
def test_the_demo_learns_on_one_base_and_survives_its_owner(tmp_path: Path) -> None:
    overrides = ["steps=20", "data.eval.size=100", "data.eval.every=20", f"output_dir={tmp_path}", "trackers=[]"]
    process = subprocess.Popen(
        [sys.executable, "-m", "learner.main", "--config", "configs/local_cpu.yaml", "memory.base=shared", *overrides],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment(str(tmp_path)),
    )  # fmt: skip
    metrics = tmp_path / "demo-seed0" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 5):
        time.sleep(0.2)
    (generator,), (learner,) = (pids(str(tmp_path), name) for name in ("generator-0", "learner"))
    assert (mapped(generator), mapped(learner)) == (["rw-s"], ["r--s"])
    os.kill(generator, signal.SIGKILL)
    while process.poll() is None and (len(now := pids(str(tmp_path), "generator-0")) != 1 or now == [generator]):
        time.sleep(0.2)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert len(re.findall(r"generator-0: process died .* starting a fresh process \(1 of 3\)", output)) == 1, output
    lines = {line["step"]: line for line in map(json.loads, metrics.read_text().splitlines())}
    assert sorted(lines) == list(range(21))
    # As in test_learning.py.
    assert lines[0]["eval/accuracy"] < 0.45
    assert lines[20]["eval/accuracy"] > 0.7
