"""learner.train as a notebook calls it: the example of the README in a running event loop, killed, resumed, done."""

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from benchmarks.common import marked
from tests.flow.run import environment, wait_until
from tests.test_documents import ROOT, blocks

# A cell is compiled and executed in the names of `__main__`, while the kernel's event loop runs.
NOTEBOOK = """
import asyncio, json, os, signal, sys
from learner import evaluate
found = None
CELL, KILL_AT, seen = sys.argv[1], int(sys.argv[2]), []

def print(step, accuracy):
    seen.append(step)
    if step == KILL_AT:
        os.kill(os.getpid(), signal.SIGKILL)

async def kernel():
    exec(compile(CELL, "cell", "exec"), globals())

asyncio.run(kernel())
if not seen:  # all was done already
    found = evaluate(run=result).metrics["greedy"].value
told = {"seen": seen, "metrics": result.metrics, "adapter": str(result.adapter), "after": result.after, "found": found}
sys.stdout.write("TOLD " + json.dumps(told))
"""


@pytest.mark.long  # tests/flow/test_user_files.py runs train() from a script in every `make test`
@pytest.mark.timeout(400)
def test_a_cell_of_a_notebook(tmp_path: Path) -> None:
    (cell,) = [block for block in blocks("python") if "import train" in block]
    cell = cell.replace("steps=40", 'steps=3, **{"rollout.max_completion_length": 48}')
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    marker = f"gleaner-test-{uuid.uuid4().hex}"

    def run(kill_at: int) -> subprocess.CompletedProcess[str]:
        env = environment(marker) | {"PYTHONPATH": str(ROOT), "FORCE_COLOR": "1"}  # as a kernel's
        command = [sys.executable, "-c", NOTEBOOK, cell, str(kill_at)]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)

    killed = run(1)
    assert killed.returncode < 0, killed.stderr
    wait_until(lambda: marked(marker) == {}, "the run to end with what had called it", seconds=90)
    checkpoints = os.listdir(tmp_path / "runs" / "run" / "checkpoints")
    assert len(checkpoints) == 1  # it finished its step first
    step = int(checkpoints[0].removeprefix("step-"))
    assert 1 <= step < 3

    resumed = run(-1)
    assert resumed.returncode == 0, resumed.stderr
    printed, _, told = resumed.stdout.partition("TOLD ")
    answer = json.loads(told)
    assert re.search(rf"resumed at step {step}\b", printed)
    assert "\x1b" not in printed
    assert answer["seen"] == list(range(step + 1, 4))
    assert [row["step"] for row in answer["metrics"]] == [0, 1, 2, 3]
    last = answer["metrics"][-1]
    assert last["reward/short"] < 0 <= last["reward/number"]  # both functions were asked, the cell's own too
    assert last["reward/mean"] == pytest.approx(last["reward/number"] + 0.1 * last["reward/short"], abs=1e-6)
    assert answer["after"]["step"] == 3
    assert (Path(answer["adapter"]) / "adapter_config.json").is_file()

    again = run(-1)
    assert "all 3 steps are done already" in again.stdout
    held_out = answer["after"]["eval/accuracy"]  # on the same problems by the same weights
    assert json.loads(again.stdout.partition("TOLD ")[2]) == answer | {"seen": [], "found": held_out}
