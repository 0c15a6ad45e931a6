"""A whole run whose learner is of two ranks."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.random_model import make_tiny_model
from rollout import ledger
from tests.flow.run import Run, wait_until

WEIGHTS = "model.safetensors"


def rank(run: Run, number: int) -> list[int]:
    """The process ids of this rank: one, once it is there."""
    return [pid for pid, command in run.processes().items() if f"ray::learner-{number}" in command]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_and_hung_ranks_are_replaced_and_one_process_learns_the_same(tmp_path: Path) -> None:
    """No step is lost; taken again by a learner of one process, every step has the same digest."""
    model = make_tiny_model(tmp_path / "tiny", family="Llama")
    run = Run(tmp_path, model, steps=8, cluster={"learners": 2})
    with run.watched() as (_, addresses):
        process = run.start("data.eval.every=0", "checkpoint.every=8", "cluster.patience=0.1")
        wait_until(lambda: rank(run, 1) != [], "a rank to start", 60, process)
        (starting,) = rank(run, 1)
        os.kill(starting, signal.SIGKILL)
        for lost, by, after in ((1, signal.SIGKILL, 2), (0, signal.SIGSTOP, 4)):
            wait_until(lambda after=after: len(run.metrics()) > after, f"{after + 1} steps", 240, process)  # type: ignore[misc]
            (pid,) = rank(run, lost)
            os.kill(pid, by)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "learner-1: process died during start" in output, output
    assert "learner-0: pulse gave no answer within 10 s" in output, output
    for lost, kept in ((1, 0), (0, 1)):
        said = rf"learner-{lost}: process died .* it was killed .*; learner-{lost}: a fresh .* state of learner-{kept}"
        assert re.search(said, " ".join(output.split())), output
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6, 7, 8]
    rows = [ledger.read(path) for path in ledger.steps(run.folder / "rollouts")]
    places = [place for step in rows for place in dict.fromkeys(step.column("position").to_pylist())]
    assert places == list(range(24))
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=30)
    one_process_learns_the_same(run)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_learner_of_one_process_learns_the_same_as_ranks_that_divide_the_base(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny", family="Llama", tied=False)
    run = Run(tmp_path, model, steps=3, cluster={"learners": 2}, memory={"layout": "sharded"})
    run.finish("data.eval.every=0")
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    one_process_learns_the_same(run)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_whole_model_in_shards_outlives_a_rank_and_goes_on_in_one_process(tmp_path: Path) -> None:
    """Its newest checkpoint is written by two ranks, read by two fresh ones, then by a learner of one process. All are
    held to what the first began with: were it what each began with itself, its first step would have no KL."""
    model = make_tiny_model(tmp_path / "tiny", family="Llama", tied=False)
    full = {"mode": "full", "learning_rate": 1e-4, "restarts": 1, "loss": {"beta": 0.1}}
    run = Run(tmp_path, model, steps=8, cluster={"learners": 2}, memory={"layout": "sharded"}, learner=full)
    process = run.start("data.eval.every=0", "checkpoint.every=2")
    wait_until(lambda: len(run.metrics()) > 3, "four steps", 120, process)
    (lost,) = rank(run, 1)
    os.kill(lost, signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert re.search(r"learner-1: process died .*; restart 1 of 1, with fresh", " ".join(output.split())), output
    alone = run.start("data.eval.every=0", "steps=10", "cluster.learners=1", "memory.layout=auto")
    output, _ = alone.communicate(timeout=240)
    assert alone.returncode == 0, output
    assert "resumed at step 8" in output, output
    assert [line["step"] for line in run.metrics()] == list(range(1, 11))
    assert all(line["policy/mismatch_max"] < 1e-3 for line in run.metrics())  # the generator has what is learned
    assert [line["policy/kl"] > 1e-9 for line in run.metrics()] == [False] + [True] * 9
    published = load_file(run.folder / "model" / WEIGHTS)
    assert any(not torch.equal(weight, published[name]) for name, weight in load_file(model / WEIGHTS).items())


def one_process_learns_the_same(run: Run) -> None:
    words = [sys.executable, "-m", "learner.tools.cli", "replay", str(run.folder)]
    replayed = subprocess.run(words, capture_output=True, text=True, env=run.environment(), timeout=240, check=False)
    assert "every policy has the digest that the run recorded" in replayed.stdout, replayed
