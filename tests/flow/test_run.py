"""Whole runs on real Ray and real vLLM: what they write, how they resume, how they end."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.files import digest_of
from examples.random_model import make_tiny_model
from learner.driver import checkpoint
from learner.tools.cli import main
from rollout import ledger
from rollout.schema import ragged
from tests.flow.run import Run, ctrl_c, metrics_page, wait_until

SAME_WHEN_RESUMED = ("loss/total", "loss/grad_norm", "reward/mean", "eval/accuracy", "rollout/tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", family="Llama")


@pytest.mark.timeout(900)
def test_a_run_and_its_resumption(tmp_path: Path, model: Path) -> None:
    data = os.path.relpath(tmp_path / "data.jsonl")  # of where it is started
    run = Run(tmp_path, model, data={"path": data, "eval": {"size": 2, "every": 2}})
    with run.watched() as (shared_memory, addresses):
        output = run.finish()
    assert all(word in output for word in (str(run.folder), "adapter", "(learner pid="))
    assert "\x1b" not in output  # colours are a terminal's
    first = run.metrics()
    assert [line["step"] for line in first] == [0, 1, 2, 3, 4]
    assert max(line["policy/mismatch_max"] for line in first[1:]) < 1e-3  # fp32: sampler and learner agree
    assert all(line["policy/staleness_mean"] == 0 for line in first[1:])
    assert first[4]["loss/grad_norm"] > 0

    positions = [p for path in ledger.steps(run.folder / "rollouts") for p in _positions(path)]
    assert positions == list(range(12))  # every group at rest, in order, exactly once
    before = _tokens(run.folder / "rollouts" / "step-000003.parquet")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    _evaluated_alone_it_scores_as_in_the_run(run, first[4]["eval/accuracy"])
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), run.folder / "adapter")
    assert any(p.abs().sum() > 0 for name, p in adapted.named_parameters() if "lora_B" in name)
    _exported_it_is_a_model_that_says_the_same(run, adapted.merge_and_unload(), tmp_path / "out")

    shutil.rmtree(run.folder / "checkpoints" / checkpoint.name_of(4))  # as if it had been stopped after step 2
    assert "resumed at step 2" in run.finish()
    second = run.metrics()
    assert [line["step"] for line in second] == [0, 1, 2, 3, 4]
    for old, new in zip(first[3:], second[3:], strict=True):
        for key in SAME_WHEN_RESUMED:
            if key in old:
                assert new[key] == pytest.approx(old[key], rel=1e-5, abs=1e-7), key
    _replayed_it_leads_to_the_same_policies(run)
    after = _tokens(run.folder / "rollouts" / "step-000003.parquet")
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=30)
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert shared_memory  # semaphores of reward processes, else nothing was seen
    assert [name for name in shared_memory if Path(name).exists()] == []


def _evaluated_alone_it_scores_as_in_the_run(run: Run, accuracy: float) -> None:
    """From another folder than that in which it was started."""
    rows = run.folder / "eval.parquet"
    words = ["eval", "--run", str(run.folder), "--samples", "2", "--json", "--save", str(rows)]
    found = json.loads(run.gleaner(*words, cwd=run.folder))
    assert found["metrics"]["greedy"]["value"] == pytest.approx(accuracy, abs=1e-6)
    assert found["adapter_digest"] == digest_of(run.folder / "adapter" / "adapter_model.safetensors")["sha256"]
    assert {"mean@2", "pass@1", "pass@2", "majority@2"} < set(found["metrics"])
    assert (found["problems"], ledger.read(rows).num_rows) == (2, 2 + 4)
    rows.unlink()


def _replayed_it_leads_to_the_same_policies(run: Run) -> None:
    found = json.loads(run.gleaner("replay", str(run.folder), "--json"))
    assert (found["same"], found["to"]) == (True, 4), found


def _exported_it_is_a_model_that_says_the_same(run: Run, merged: Any, out: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert main(["export", str(run.folder), str(out)]) == 0  # by what the run itself has recorded
    found = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(np.allclose(weight, found[name], atol=1e-6) for name, weight in merged.state_dict().items())
    assert "| step 0 | step 4 |" in (out / "README.md").read_text()


ON_ONE_BASE = ("memory.layout=shared",)  # which is lost with the generator
CONTINUED = ("learner.push=merged", "rollout.in_flight=continue", "trackers=[prometheus]")


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("overrides", [ON_ONE_BASE, CONTINUED])
def test_lost_processes_and_the_end_of_a_run(tmp_path: Path, model: Path, overrides: tuple[str, ...]) -> None:
    run = Run(tmp_path, model, steps=100_000, max_staleness=1)
    process = run.start(*overrides)
    wait_until(lambda: len(run.metrics()) > 9, "nine steps", process=process)
    assert run.metrics()[-1]["rollout/restarts"] == 0  # pushes and their probes amid generation hurt nobody
    generator = _holder(run, "generator-0")
    if overrides == ON_ONE_BASE:
        assert (_base(generator), _base(_holder(run, "learner"))) == (["rw-s"], ["r--s"])
    else:
        opened = map(os.readlink, Path(f"/proc/{_holder(run, 'learner')}/fd").iterdir())
        assert any("gleaner-weights" in name for name in opened)  # whole weights go no other way on one machine
        wait_until(lambda: "ray_gleaner_step" in metrics_page(run.folder), "a step on the page of Ray's agent")
    os.kill(generator, signal.SIGKILL)
    wait_until(lambda: run.metrics()[-1].get("rollout/restarts") == 1, "a step after the restart", process=process)
    ctrl_c(process)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert re.search(r"generator-0: process died .*; starting a fresh process \(1 of 3\)", output)
    assert "trackers: prometheus failed" not in output
    lines = run.metrics()
    newest, skipped = checkpoint.newest(run.folder / "checkpoints")
    assert newest is not None
    assert not skipped
    assert checkpoint.step_of(newest) == lines[-1]["step"]
    assert max(line.get("policy/staleness_max", 0) for line in lines) <= 1
    assert max(line.get("policy/mismatch_max_current", 0) for line in lines) < 1e-3  # of the fresh process, too
    assert any(line.get("time/overlap", 0) > 0 for line in lines)  # generator and learner worked at the same time
    state = json.loads((newest / "state.json").read_text())["cursor"]
    consumed = sorted(p for path in ledger.steps(run.folder / "rollouts") for p in _positions(path))
    assert consumed == sorted([*range(state["low"]), *state["done"]])  # nothing lost, nothing twice
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=30)
    if overrides == ON_ONE_BASE:
        _lose_the_driver(run, lines[-1]["step"], overrides)


def _lose_the_driver(run: Run, step: int, overrides: tuple[str, ...]) -> None:
    process = run.start(*overrides)
    wait_until(lambda: run.metrics()[-1]["step"] > step, "a step after the resumption", process=process)
    process.kill()
    process.wait()
    wait_until(lambda: run.processes() == {}, "all processes to end after SIGKILL of the driver", seconds=90)


def _base(pid: int) -> list[str]:
    """How the process maps a generator's base: permissions of each mapping."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if "gleaner-base" in line]


def _holder(run: Run, role: str) -> int:
    """The process that holds a role, by the log line that it wrote at its start."""
    (pid,) = [pid for pid, command in run.processes().items() if f"ray::{role}" in command]
    return pid


def _positions(path: Path) -> list[int]:
    rows = ledger.read(path).select(["position", "sample"]).to_pylist()
    return [row["position"] for row in rows if row["sample"] == 0]


def _tokens(path: Path) -> list[np.ndarray]:
    return ragged(ledger.read(path), "completion_ids")
