"""A teacher that is a model of its own (model.teacher), in a process of its own, in the whole system."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.random_model import make_tiny_model
from learner.driver import checkpoint
from rollout import ledger
from rollout.schema import ragged
from tests.flow.run import Run, wait_until

TOP, TOLERANCE = 3, 1e-4  # nats
TAUGHT = ("learner.algorithm=distill", "learner.loss.beta=1", f"learner.loss.teacher_top={TOP}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy, and a larger model with the same tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    larger = make_tiny_model(folder / "larger", family="Llama", seed=5, hidden_size=128, layers=3, heads=4)
    return make_tiny_model(folder / "tiny", family="Llama"), larger


def teacher_of(run: Run) -> int | None:
    """Its process, once it has its name."""
    return next((pid for pid, line in run.processes().items() if "ray::teacher-0" in line), None)


def check(run: Run, folder: Path) -> None:
    """Each row of the ledger says what Hugging Face computes of its completion, behind its prompt."""
    teacher: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for file in ledger.steps(run.folder / "rollouts"):
        rows = ledger.read(file)
        names = ("prompt_ids", "completion_ids", "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
        for prompt, ids, told, top, logprobs in zip(*(ragged(rows, name) for name in names), strict=True):
            with torch.no_grad():
                logits = teacher(torch.tensor([[*prompt.tolist(), *ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
            every = np.asarray(logits.log_softmax(-1))
            assert np.abs(told - np.take_along_axis(every, ids[:, None].astype(int), -1)[:, 0]).max() < TOLERANCE
            own = np.take_along_axis(every, top.reshape(-1, TOP).astype(int), -1)
            assert np.abs(logprobs.reshape(-1, TOP) - own).max() < TOLERANCE
            assert np.abs(own - np.sort(every, -1)[:, : -TOP - 1 : -1]).max() < TOLERANCE


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_teacher_costs_no_group_and_what_it_said_is_learned_from_again(
    tmp_path: Path, models: tuple[Path, Path]
) -> None:
    """Killed in the middle of a run with two generators, whose groups the fresh one tells of. The run goes on from a
    checkpoint to the same digests, and is computed again when the teacher is gone for good."""
    policy, larger = models
    run = Run(tmp_path, policy, steps=6, cluster={"patience": 0.2})
    taught = (*TAUGHT, f"model.teacher={larger}")
    process = run.start(*taught, "rollout.workers=2", "checkpoint.keep=9")
    wait_until(lambda: len(run.metrics()) > 2, "2 steps", 240, process)
    lost = teacher_of(run)
    assert lost is not None
    os.kill(lost, signal.SIGKILL)
    wait_until(lambda: teacher_of(run) not in (None, lost), "a fresh one", 240, process)
    output, _ = run.communicate(process, 300)
    assert process.returncode == 0, output
    assert re.findall(r"learner: (\S+): .*; starting a fresh process", output) == ["teacher-0"], output
    steps = [line for line in run.metrics() if line["step"] > 0]
    assert [line["step"] for line in steps] == list(range(1, 7))
    places = [
        place
        for file in ledger.steps(run.folder / "rollouts")
        for place in dict.fromkeys(
            zip(*(ledger.read(file)[name].to_pylist() for name in ("position", "attempt")), strict=True)
        )
    ]
    assert sorted(places) == [(place, 0) for place in range(18)], "a group was lost, asked again or trained twice"
    check(run, larger)
    wait_until(lambda: run.processes() == {}, "all processes to end", seconds=30)

    digests = (run.folder / "policies.jsonl").read_text().splitlines()
    for step in (4, 6):
        shutil.rmtree(run.folder / "checkpoints" / checkpoint.name_of(step))  # as if it had been stopped after step 2
    assert "resumed at step 2" in run.finish(*taught, "rollout.workers=2", "checkpoint.keep=9")
    assert (run.folder / "policies.jsonl").read_text().splitlines() == digests
    shutil.move(larger, tmp_path / "gone")
    found = json.loads(run.gleaner("replay", str(run.folder), "--json"))
    assert (found["same"], found["to"]) == (True, 6), found


def test_a_policy_that_teaches_itself_has_nothing_to_learn(tmp_path: Path, models: tuple[Path, Path]) -> None:
    """The teacher is the policy's own model: what it says are the sampler's own logprobs, and the KL is 0 at first."""
    policy, _ = models
    run = Run(tmp_path, policy, steps=1)
    run.finish(*TAUGHT[:2], f"model.teacher={policy}", "data.eval.every=0")
    (first,) = [line for line in run.metrics() if line["step"] == 1]
    assert abs(first["policy/kl"]) < 1e-6
    (rows,) = [ledger.read(file) for file in ledger.steps(run.folder / "rollouts")]
    for own, told in zip(ragged(rows, "behavior_logprobs"), ragged(rows, "teacher_logprobs"), strict=True):
        assert np.abs(own - told).max() < TOLERANCE
    assert rows.column("teacher_top_ids").null_count == rows.num_rows  # nobody asked for these
