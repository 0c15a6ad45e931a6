"""The seconds of a step that gleaner tells before a run (cluster.memory.seconds), beside those that were measured.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.hours            the rows of cards, from benchmarks/results/gpu
    PYTHONPATH=. .venv/bin/python -m benchmarks.system.hours --cpu      runs on this machine's CPU as well, 15 minutes

A row is a whole run (medians of its metrics after two steps) or a step of the learner alone. The planner's choices and
the mean length of completions are those of the run. The constants of cluster.memory.seconds were set by hand with a
view to the rows marked `fitted`; the others were only compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from benchmarks.common import RESULTS, ROOT, as_table, conditions, parser_of, save, under
from benchmarks.system.system_run import Tree, add_ragged_options, demo_of_one, finished, ragged
from cluster.memory.plan import Workload, named
from cluster.memory.seconds import Learning, Rates, Seconds, measured_rates, step_seconds
from cluster.memory.shape import SHAPES, Shape
from cluster.reading import read_yaml
from learner.config.load import load_config

H100, H100_BEFORE = "nvidia-h100-80gb-hbm3-2026-11-27", "nvidia-h100-80gb-hbm3-2026-11-23"
H200 = "nvidia-h200-2026-11-26"
QUESTION = 90  # tokens of a GSM8K question, about, which the runs on cards have as prompts
PARTS = ("time/step", "time/generate", "time/train")
WARM = 2  # steps before those that count


class Card(NamedTuple):
    """A run on a card. file: below results/gpu, without its ending. steps: whether its metrics of every step are there,
    else their means. whole: whether the whole step is compared (not where a push was slower than it is now)."""

    file: str
    card: str
    shape: str
    mode: str = "lora"
    fitted: bool = False
    steps: bool = True
    whole: bool = True
    together: bool = False


RUNS = (
    Card(f"{H100}/d-1b-slices", "h100", "Llama-3.2-1B", fitted=True),
    Card(f"{H100}/d-1b-full-again", "h100", "Llama-3.2-1B", "full"),
    Card(f"{H100}/d-1b-full", "h100", "Llama-3.2-1B", "full"),
    Card(f"{H100}/e-8b-nf4-24gib", "h100", "Llama-3.1-8B", fitted=True),
    Card(f"{H200}/d-1b-async", "h200", "Llama-3.2-1B", steps=False, together=True),
    Card(f"{H200}/d-1b-full", "h200", "Llama-3.2-1B", "full", whole=False),
    Card(f"{H200}/e-8b-slices", "h200", "Llama-3.1-8B", steps=False),
)
# Steps of the learner alone: 4 groups of 4 completions, prompts of 256.
STEPS = {
    "a-Llama-3.2-1B-lora": True, "a-Llama-3.2-1B-full": True, "a-Llama-3.2-1B-full-8bit-ckpt": False,
    "a-Llama-3.2-1B-qlora": True, "a-Llama-3.1-8B-lora": False, "a-Llama-3.1-8B-full-8bit-ckpt": False,
}  # fmt: skip


class Row(NamedTuple):
    """found: seconds of step, generation and training as measured; None: not compared."""

    name: str
    fitted: bool
    told: Seconds
    found: tuple[float | None, float | None, float | None]


def runs() -> Iterator[Row]:
    for run in RUNS:
        base = RESULTS / "gpu" / run.file
        whole: dict[str, Any] = {} if run.steps else json.loads(Path(f"{base}.json").read_text())
        lines = [whole] if not run.steps else _later(Path(f"{base}-metrics.jsonl"))
        plan = json.loads(Path(f"{base}-plan.json").read_text()) if run.steps else whole["plan"]
        step, generate, train = (median(line[name] for line in lines) for name in PARTS)
        length = mean(line.get("rollout/completion_length", 786.0) for line in lines)
        (kind,) = named(run.card)
        work = Workload(8, QUESTION, 786, plan["sequences"])
        learning = Learning(run.mode, "bfloat16", plan["base"], plan["checkpointing"], plan["token_budget"], 8)  # type: ignore[arg-type]
        told = step_seconds(
            SHAPES[run.shape], work, learning, Rates(kind.flops, kind.bandwidth), cuda=True, length=length,
            together=run.together,
        )  # fmt: skip
        # Where both roles work at once on one card, the parts slow each other, and the step alone says what they take.
        parts = (None, None) if run.together else (generate, train)
        yield Row(run.file.replace("nvidia-", ""), run.fitted, told, (step if run.whole else None, *parts))


def learner_steps() -> Iterator[Row]:
    (kind,) = named("h100")
    for name, fitted in STEPS.items():
        one = json.loads((RESULTS / "gpu" / H100_BEFORE / f"{name}.json").read_text())
        mode, base = ("full" if "full" in name else "lora"), ("nf4" if "qlora" in name else "none")
        learning = Learning(mode, "bfloat16", base, one["checkpointing"], int(one["token_budget"]), 4)  # type: ignore[arg-type]
        told = step_seconds(
            SHAPES[one["shape"]], Workload(one["generations"], 256, 786), learning,
            Rates(kind.flops, kind.bandwidth), cuda=True, length=786,
        )  # fmt: skip
        yield Row(f"h100 learner alone: {name.removeprefix('a-')}", fitted, told, (None, None, one["step_seconds"]))


def cpu_runs(options: argparse.Namespace) -> Iterator[Row]:
    """Runs of the demo, of the ragged workload and of SmolLM2, each role on one core, and one step after the other."""
    for name, tree in _trees(options):
        with finished(tree | {"max_staleness": 0, "trackers": []}, 1800) as run:
            lines, config = _later(run / "metrics.jsonl"), load_config(str(run / "config.yaml"), [])
            prompts = [
                len(ids)
                for file in (run / "rollouts").glob("*.parquet")
                for ids in pq.read_table(file, columns=["prompt_ids"])["prompt_ids"].to_pylist()
            ]
            plan = json.loads((run / "plan.json").read_text())
        rates = measured_rates(config.model.dtype, 1)
        step, generate, train = (median(line[part] for line in lines) for part in PARTS)
        shape = Shape.from_config(json.loads((Path(config.model.path) / "config.json").read_text()), name)
        most, groups = config.rollout.max_completion_length, config.learner.groups_per_step
        work = Workload(config.rollout.num_generations, round(mean(prompts)), most, plan["sequences"])
        learning = Learning("lora", config.model.dtype, "none", plan["checkpointing"], plan["token_budget"], groups)
        length = mean(line["rollout/completion_length"] for line in lines)
        told = step_seconds(shape, work, learning, rates, cuda=False, length=length)
        yield Row(f"cpu {name}, {rates.flops / 1e9:.0f} GFLOP/s", name == "ragged 25M", told, (step, generate, train))


def _trees(options: argparse.Namespace) -> Iterator[tuple[str, Tree]]:
    yield "demo 0.4M", demo_of_one(10, 0)
    with tempfile.TemporaryDirectory() as folder:
        options.steps, options.skip = 3, WARM
        yield "ragged 25M", ragged(Path(folder), options) | {"seed": 0}
    tree = read_yaml(ROOT / "configs" / "real_cpu.yaml")
    for section, key in (("model", "path"), ("data", "path")):
        tree[section][key] = str(ROOT / tree[section][key])
    tree["rewards"][0]["use"] = f"{ROOT}/{tree['rewards'][0]['use']}"
    tree["data"]["eval"] = {"every": 0}
    yield "SmolLM2-135M", tree | {"steps": 5, "checkpoint": {"every": 5}}


def _later(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if line.get("step", 0) > WARM and "time/step" in line]


def table(rows: Sequence[Row]) -> str:
    cells, worst = [], 0.0
    for row in rows:
        line = [row.name, "fitted" if row.fitted else "checked"]
        for told, found in zip((row.told.step, row.told.generate, row.told.train), row.found, strict=True):
            line.append("" if found is None else f"{told:.2f} / {found:.2f} = {told / found:.2f}")
            worst = worst if found is None else max(worst, abs(told / found - 1))
        cells.append(line)
    header = ["row", "", "step: told / measured, s", "generation", "training"]
    return f"{as_table(header, cells)}\n\nFarthest from 1: {worst:.0%}."


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cpu", action="store_true", help="measure on this machine's CPU, too")
    add_ragged_options(parser)
    options = parser.parse_args()
    rows = [*runs(), *learner_steps()]
    if not options.cpu:
        print(table(rows))
        return
    told = conditions()
    rows += cpu_runs(options)
    text = f"# Seconds of a step: told before the run, and measured\n\n{table(rows)}\n\nConditions of the rows `cpu`: "
    content = [row._asdict() | {"told": [row.told.step, row.told.generate, row.told.train]} for row in rows]
    save("hours", {"conditions": told, "rows": content}, text + under(told, "wall time, one core for each role"))


if __name__ == "__main__":
    main()
