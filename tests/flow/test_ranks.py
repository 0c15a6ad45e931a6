"""A whole run whose learner is of two ranks."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.random_model import make_tiny_model
from rollout import ledger
from tests.flow.run import Run, wait_until


@pytest.mark.timeout(600)
def test_a_killed_rank_is_a_lost_learner_and_one_process_learns_the_same(tmp_path: Path) -> None:
    """The run goes on from its checkpoint; taken again by a learner of one process, every step has the same digest."""
    model = make_tiny_model(tmp_path / "tiny", family="Llama")
    run = Run(tmp_path, model, steps=6, checkpoint={"every": 2}, cluster={"learners": 2})
    with run.watched() as (_, addresses):
        process = run.start("learner.restarts=1", "data.eval.every=0")
        wait_until(lambda: len(run.metrics()) > 2, "three steps", 240, process)
        (lost,) = (pid for pid, command in run.processes().items() if "ray::learner-1" in command)
        os.kill(lost, signal.SIGKILL)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    said = r"learner-1: process died during \w+: pid \d+: it was killed by a signal .*; restart 1 of 1, with fresh"
    assert re.search(said, output), output
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]
    rows = [ledger.read(path) for path in ledger.steps(run.folder / "rollouts")]
    places = [place for step in rows for place in dict.fromkeys(step.column("position").to_pylist())]
    assert places == list(range(18))
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=30)
    words = [sys.executable, "-m", "learner.tools.cli", "replay", str(run.folder)]
    replayed = subprocess.run(words, capture_output=True, text=True, env=run.environment(), timeout=240, check=False)
    assert "every policy has the digest that the run recorded" in replayed.stdout, replayed
