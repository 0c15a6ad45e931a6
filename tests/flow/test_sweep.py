"""Sweeps of real runs: each run is an ordinary one, and what happens to one or to their processes costs the others
nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import ROOT
from examples.random_model import make_tiny_model
from rollout import ledger
from tests.flow.run import Run, wait_until

STEPS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", family="Llama")


class Sweep(Run):
    """A sweep of the runs of one configuration; `folder` is that of the sweep."""

    def sweep(self, *words: str) -> subprocess.Popen[str]:
        """A new process of `gleaner sweep`."""
        return subprocess.Popen(
            [sys.executable, "-m", "learner.tools.cli", "sweep", str(self.config), *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment(),
            start_new_session=True,
        )  # fmt: skip

    def ends(self, process: subprocess.Popen[str], code: int = 0) -> str:
        output, _ = self.communicate(process, 300)
        assert process.returncode == code, output
        return output

    def steps(self, name: str) -> list[int]:
        file = self.folder / name / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line)["step"] for line in text.splitlines() if line.endswith("}")]

    def recorded(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "sweep.json").read_text())["runs"]
        return found

    def process_of(self, role: str) -> int:
        (pid,) = [pid for pid, command in self.processes().items() if f"ray::{role}" in command]
        return pid

    def check(self, name: str) -> None:
        """The run is whole, and a replay by the ordinary learner gives each of its policies."""
        assert self.steps(name) == list(range(STEPS + 1))
        rows = [ledger.read(path) for path in ledger.steps(self.folder / name / "rollouts")]
        places = [place for step in rows for place in dict.fromkeys(step.column("position").to_pylist())]
        assert places == list(range(3 * STEPS)), "each problem once, in order"
        told = self.gleaner("replay", str(self.folder / name))
        assert "every policy has the digest that the run recorded" in told


@pytest.mark.timeout(400)
def test_a_run_that_diverges_ends_alone_and_a_lost_generator_is_replaced_for_all(tmp_path: Path, model: Path) -> None:
    sweep = Sweep(tmp_path, model, steps=STEPS)
    process = sweep.sweep("learner.learning_rate=1e-3,1e30,3e-3")
    wait_until(lambda: 3 in sweep.steps("learning_rate-3e-3"), "three steps", process=process)
    os.kill(sweep.process_of("generator-0"), signal.SIGKILL)
    output = sweep.ends(process, 1)
    assert re.search(r"generator-0: process died .*; starting a fresh process \(1 of 3\)", output)
    sweep.check("learning_rate-1e-3")
    sweep.check("learning_rate-3e-3")
    found = sweep.recorded()
    assert [found[f"learning_rate-{rate}"]["state"] for rate in ("1e-3", "1e30", "3e-3")] == ["done", "failed", "done"]
    assert "policy v1: its logprobs must be finite" in found["learning_rate-1e30"]["error"]
    assert found["learning_rate-1e-3"]["given"] == {"learner.learning_rate": "1e-3"}
    assert [step for step, _ in found["learning_rate-3e-3"]["evaluations"]] == [0, 2, 4, 6, 8]
    wait_until(lambda: sweep.processes() == {}, "all processes to end", seconds=30)
    again = sweep.sweep("learner.learning_rate=1e-3,3e-3")
    assert sweep.ends(again).count(f"all {STEPS} steps are done already") == 2


SCRIPT = """
import json, sys
from gleaner import sweep

def short(completions, **columns):
    return [-len(completion[0]["content"]) / 100 for completion in completions]

values = {"seed": [0, 1], "learner.learning_rate": [1e-3, 1e30]}
found = sweep(values, rewards=[short], zipped=True, config=sys.argv[1], steps=2)
told = {name: [run.state, run.given["seed"], len(run.metrics), bool(run.adapter)] for name, run in found.runs.items()}
print(json.dumps(told))
"""


@pytest.mark.timeout(300)
def test_python_gets_each_run_s_result_also_where_one_has_failed(tmp_path: Path, model: Path) -> None:
    sweep = Sweep(tmp_path, model)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(sweep.config)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=sweep.environment() | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    assert json.loads(sweep.ends(process).splitlines()[-1]) == {
        "seed-0_learning_rate-0.001": ["done", "0", 3, True],
        "seed-1_learning_rate-1e30": ["failed", "1", 1, False],
    }


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", ["learner", "driver"])
def test_all_runs_go_on_from_their_checkpoints(tmp_path: Path, model: Path, lost: str) -> None:
    sweep = Sweep(tmp_path, model, steps=STEPS, max_staleness=1)
    words = ("seed=3,4", "learner.lora.rank=4,8", "--zip")
    names = ["seed-3_rank-4", "seed-4_rank-8"]
    process = sweep.sweep(*words)
    wait_until(lambda: all(5 in sweep.steps(name) for name in names), "five steps", process=process)
    os.kill(process.pid if lost == "driver" else sweep.process_of("learner"), signal.SIGKILL)
    if lost == "driver":
        process.communicate(timeout=60)
        roles = ("ray::learner", "ray::generator")
        wait_until(lambda: not any(one.startswith(roles) for one in sweep.processes().values()), "the roles' end")
        process = sweep.sweep(*words)
    output = sweep.ends(process)
    assert ("all runs go on from their checkpoints" in output) == (lost == "learner")
    for name in names:
        assert re.search(rf"{name}: resumed at step [46] from ", output), output
        sweep.check(name)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ctrl_c_ends_all_runs_with_checkpoints(tmp_path: Path, model: Path) -> None:
    sweep = Sweep(tmp_path, model, steps=STEPS)
    process = sweep.sweep("seed=0,1", "learner.learning_rate=1e-3,2e-3")
    names = [f"seed-{seed}_learning_rate-{rate}" for seed in (0, 1) for rate in ("1e-3", "2e-3")]
    wait_until(lambda: all(2 in sweep.steps(name) for name in names), "two steps", process=process)
    os.killpg(process.pid, signal.SIGINT)
    sweep.ends(process)
    found = sweep.recorded()
    assert {found[name]["state"] for name in names} <= {"stopped", "done"}
    assert sweep.ends(sweep.sweep("seed=0,1", "learner.learning_rate=1e-3,2e-3"))
    for name in names:
        sweep.check(name)
