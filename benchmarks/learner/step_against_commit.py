"""The learner's step as it is against an earlier commit: CPU time on one core, peak, and the gradient's error.

    PYTHONPATH=. .venv/bin/python -m benchmarks.learner.step_against_commit REVISION

Both run the ragged workload (benchmarks/learner/ragged_step.py) in a process of their own on the same core, and take
turns, step by step, so that a machine whose speed changes changes it for both. The gradient's error is its distance
from the gradient in float64, by transformers and PEFT, one completion at a time, with plain autograd.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.commits import checked_out, short
from benchmarks.common import MIB, as_table, conditions, relative_error, save, under
from benchmarks.learner.ragged_step import LONGEST, read_groups
from benchmarks.system.ragged_model import make_model
from benchmarks.system.workloads import PROMPT_WORDS, ROOT, TEMPLATE_TOKENS
from learner.algo.advantage import group as advantages_of
from rollout.fakes import make_group
from rollout.types import Completion

GROUPS, GENERATIONS = 8, 8
END_RATE = 0.0085  # of a token; completions then have 92 tokens on average
RANK, ALPHA = 16, 32  # the learner's defaults


def write_inputs(folder: Path) -> Any:
    """Writes model, adapter and batch; the model in float64."""
    make_model(folder / "model", end_rate=0.01, context=PROMPT_WORDS[1] + TEMPLATE_TOKENS + LONGEST)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(plain, settings)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.01)
    adapted.save_pretrained(str(folder / "adapter"))
    model: Any = adapted.double().eval()
    _write_groups(folder, model)
    return model


def exact_gradient(model: Any, folder: Path) -> dict[str, Tensor]:
    """In float64, by the learner's names."""
    groups = read_groups(folder)
    total = sum(len(ids) for table in groups for ids in table["completion_ids"])
    for table in groups:
        _add_gradient(model, table, total)
    named = ((name.replace(".default.", "."), weight.grad) for name, weight in model.named_parameters())
    return {name: grad for name, grad in named if grad is not None}


def _logprobs(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    found: Tensor = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return found


@torch.no_grad()
def _write_groups(folder: Path, model: Any) -> None:
    rng = np.random.default_rng(1)
    for number in range(GROUPS):
        words = rng.integers(PROMPT_WORDS[0], PROMPT_WORDS[1] + 1) + TEMPLATE_TOKENS
        prompt = rng.integers(4, 8004, words).tolist()
        completions = []
        for length in np.minimum(rng.geometric(END_RATE, GENERATIONS), LONGEST):
            ids = rng.integers(4, 8004, length).astype(np.int32)
            told = _logprobs(model, prompt, ids.tolist()).float().numpy()
            completions.append(Completion(ids, told, "stop", np.zeros(length, np.int32)))
        table = make_group(
            number, completions=completions, rewards=rng.random(GENERATIONS).tolist(), prompt_ids=[prompt] * GENERATIONS
        )
        with pa.ipc.new_file(folder / f"group-{number}.arrow", table.schema) as file:
            file.write_table(table)


def _add_gradient(model: Any, table: pa.Table, total: int) -> None:
    """Of minus the mean over all tokens of ratio x advantage; near 1, no ratio is clipped."""
    rows = [table[name].to_pylist() for name in ("prompt_ids", "completion_ids", "behavior_logprobs")]
    (advantages,) = advantages_of([np.array(table["reward"].to_pylist())])
    for prompt, completion, behavior, advantage in zip(*rows, advantages, strict=True):
        ratios = (_logprobs(model, prompt, completion) - torch.tensor(behavior, dtype=torch.float64)).exp()
        torch.autograd.backward(-ratios.sum() * float(advantage) / total)


class Side:
    """A commit's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.library: str = self._answer()["library"]

    def ask(self, order: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of a side ended with {self._process.wait()}")
        return json.loads(line)


@contextmanager
def side(root: Path, folder: Path, dtype: str, core: int) -> Iterator[Side]:
    """What the commit lacks of the benchmarks is taken from here."""
    environment = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, "-m", "benchmarks.learner.ragged_step", str(folder), dtype],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=root, text=True,
    )  # fmt: skip
    try:
        yield Side(process)
    finally:
        process.kill()
        process.wait()


def measure(
    roots: tuple[Path, Path], folder: Path, dtype: str, exact: dict[str, Tensor], turns: int, core: int
) -> dict[str, Any]:
    """Of both sides, the earlier commit first."""
    with ExitStack() as stack:
        sides = [stack.enter_context(side(root, folder, dtype, core)) for root in roots]
        errors = []
        for own in sides:
            own.ask("step")
            own.ask(f"gradient {folder / 'found.pt'}")
            errors.append(_error(torch.load(folder / "found.pt"), exact))
        peaks = [own.ask("peak") for own in sides]
        seconds: list[list[float]] = [[], []]
        for turn in range(turns):
            for i in (0, 1) if turn % 2 else (1, 0):
                seconds[i].append(sides[i].ask("step"))
            print(f"{dtype}, turn {turn}: {seconds[0][-1]:.2f} s before, {seconds[1][-1]:.2f} s now", flush=True)
        return {"seconds": seconds, "peaks": peaks, "errors": errors, "libraries": [own.library for own in sides]}


def _error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert found.keys() == exact.keys()
    a, b = (torch.cat([one[name].flatten().double() for name in sorted(exact)]) for one in (found, exact))
    return relative_error(a, b)


def report(found: dict[str, dict[str, Any]], revision: str, told: dict[str, Any]) -> str:
    cells = []
    for dtype, row in found.items():
        before, now = row["seconds"]
        ratios = [b / a for b, a in zip(before, now, strict=True)]
        cells.append([
            dtype, f"{min(before):.2f}", f"{min(now):.2f}",
            f"{median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})",
            *(f"{peak / MIB:.0f}" for peak in row["peaks"]), *(f"{error:.2e}" for error in row["errors"]),
            row["libraries"][1],
        ])  # fmt: skip
    header = ["type", f"CPU-s, {revision}", "now", "times as fast", f"peak MiB, {revision}", "now",
              f"gradient's error, {revision}", "now", "float32 products"]  # fmt: skip
    turns = len(next(iter(found.values()))["seconds"][0])
    return (
        f"# The learner's step against an earlier commit\n\n{as_table(header, cells)}\n\n"
        f"A 25M Llama, adapter of rank {RANK} on all linear layers, {GROUPS} groups of {GENERATIONS} ragged "
        "completions (92 tokens on average) with 200-400 tokens of prompt. CPU-s: the best of "
        f"{turns} steps, in which the two took turns; times as fast: median (least - most) of the turns. Peak: most "
        "bytes of new tensors in a step. Error: "
        "distance of the adapter's gradient from that in float64, relative to its norm. float32 products: what the "
        f"start-up trial chose now (learner/trainer/float32_products.py).\n\nConditions: "
        f"{under(told, 'CPU time of one thread on one core')}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision")
    parser.add_argument("--dtype", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=8)
    options, told = parser.parse_args(), conditions()
    core = max(os.sched_getaffinity(0))
    revision = short(options.revision)
    with tempfile.TemporaryDirectory() as name, checked_out(revision) as before:
        folder = Path(name)
        exact = exact_gradient(write_inputs(folder), folder)
        found = {dtype: measure((before, ROOT), folder, dtype, exact, options.turns, core) for dtype in options.dtype}
    content = {"conditions": told, "revision": revision, "measured": found}
    save("step_against_commit", content, report(found, revision, told))


if __name__ == "__main__":
    main()
