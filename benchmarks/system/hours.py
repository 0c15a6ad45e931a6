"""The seconds of a step that gleaner tells before a run (cluster.memory.seconds), beside those that were measured.

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.hours            the rows of cards, from benchmarks/results/gpu
    PYTHONPATH=. .venv/bin/python -m benchmarks.system.hours --runs out/demo-real-seed0      and of a run on this CPU
    PYTHONPATH=. .venv/bin/python -m benchmarks.system.hours --cpu      runs on this machine's CPU as well, 20 minutes

A row is a whole run (medians of its metrics after two steps) or a step of the learner alone. The planner's choices and
the mean length of completions are those of the run. The constants of cluster.memory.seconds were set by hand, with all
rows in sight, those of cards by the rows marked `fitted` first; most of a CPU's on another machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from benchmarks.common import RESULTS, as_table, conditions, parser_of, save, under
from benchmarks.system.system_run import ON_CPUS, Tree, add_ragged_options, demo_of_one, finished, ragged, real
from cluster.memory.plan import CardKind, Plan, Wish, Workload, named
from cluster.memory.search import plan
from cluster.memory.seconds import Pace, Rates, Seconds, step_seconds
from cluster.memory.shape import SHAPES, Shape
from learner.config.load import load_config
from learner.driver.memory import NO_LIMIT, layouts, settle, wish_of, workload
from learner.tools.plan import seconds_on_cpu

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
        made = json.loads(Path(f"{base}-plan.json").read_text()) if run.steps else whole["plan"]
        step, generate, train = (median(line[name] for line in lines) for name in PARTS)
        length = mean(line.get("rollout/completion_length", 786.0) for line in lines)
        (kind,) = named(run.card)
        pace = Pace(8, length, together=run.together)
        told = _told(SHAPES[run.shape], Workload(8, QUESTION, 786), run.mode, made, pace, kind)
        # Where both roles work at once on one card, the parts slow each other, and the step alone says what they take.
        parts = (None, None) if run.together else (generate, train)
        yield Row(run.file.replace("nvidia-", ""), run.fitted, told, (step if run.whole else None, *parts))


def _told(shape: Shape, work: Workload, mode: Any, made: Any, pace: Pace, kind: CardKind) -> Seconds:
    """made: what the run's planner had chosen, as plan.json has it."""
    wish = Wish(
        mode=mode, base=made["base"], checkpointing=made["checkpointing"], token_budget=made["token_budget"],
        kv_bytes=made["kv_bytes"], layouts=("slices",),
    )  # fmt: skip
    found = plan(shape, NO_LIMIT, replace(work, sequences=made["sequences"]), wish)
    assert isinstance(found, Plan)
    found = replace(found, sequences=made["sequences"])
    return step_seconds(found, wish, work, pace, Rates(kind.flops, kind.bandwidth))


def learner_steps() -> Iterator[Row]:
    (kind,) = named("h100")
    for name, fitted in STEPS.items():
        one = json.loads((RESULTS / "gpu" / H100_BEFORE / f"{name}.json").read_text())
        mode, base = ("full" if "full" in name else "lora"), ("nf4" if "qlora" in name else "none")
        made = {"base": base, "kv_bytes": None, "sequences": 64, "checkpointing": one["checkpointing"]}
        made["token_budget"] = int(one["token_budget"])
        work = Workload(one["generations"], 256, 786)
        told = _told(SHAPES[one["shape"]], work, mode, made, Pace(4, 786.0), kind)
        yield Row(f"h100 learner alone: {name.removeprefix('a-')}", fitted, told, (None, None, one["step_seconds"]))


def cpu_runs(options: argparse.Namespace) -> Iterator[Row]:
    """Runs of the demo, of the ragged workload and of SmolLM2, each role on one core, and one step after the other."""
    for name, tree in _trees(options):
        with finished(tree | ON_CPUS | {"max_staleness": 0, "trackers": []}, 1800) as run:
            yield row_of(run, name)


def row_of(run: Path, name: str) -> Row:
    """The row of a run on this machine's CPU, one generator, one core for each role. Where both roles worked at once
    the step alone is compared, in its mean, since long and short ones alternate, without evaluations."""
    lines, config = _later(run / "metrics.jsonl"), load_config(str(run / "config.yaml"), [])
    columns = (
        pq.read_table(file, columns=["prompt_ids"])["prompt_ids"] for file in (run / "rollouts").glob("*.parquet")
    )
    prompts = [len(ids) for column in columns for ids in column.to_pylist()]
    budgets = settle(config, json.loads((Path(config.model.path) / "config.json").read_text()))
    assert budgets.plan is not None
    work = replace(workload(config, budgets.sequences), prompt=round(mean(prompts)))
    length = mean(line["rollout/completion_length"] for line in lines)
    together = config.max_staleness > 0
    pace = Pace(config.learner.groups_per_step, length, config.rollout.workers, together=together)
    told = seconds_on_cpu(budgets.plan, wish_of(config, layouts(config)), work, pace)
    found: tuple[float | None, float | None, float | None]
    if together:
        found = (mean(line["time/step"] - line["time/evaluate"] for line in lines), None, None)
    else:
        step, generate, train = (median(line[part] for line in lines) for part in PARTS)
        found = (step, generate, train)
    return Row(f"cpu {name}, {config.model.dtype}", False, told, found)


def _trees(options: argparse.Namespace) -> Iterator[tuple[str, Tree]]:
    yield "demo 0.4M", demo_of_one(10, 0)
    with tempfile.TemporaryDirectory() as folder:
        options.steps, options.skip = 3, WARM
        yield "ragged 25M", ragged(Path(folder), options) | {"seed": 0}
    yield "SmolLM2-135M", real(5, "float32")


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
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="folders of runs on this machine's CPU")
    add_ragged_options(parser)
    options = parser.parse_args()
    rows = [*runs(), *learner_steps()]
    if not options.cpu and not options.runs:
        print(table(rows))
        return
    told = conditions()
    rows += [row_of(run, run.name) for run in options.runs]
    rows += cpu_runs(options) if options.cpu else []
    text = f"# Seconds of a step: told before the run, and measured\n\n{table(rows)}\n\nConditions of the rows `cpu`: "
    content = [row._asdict() | {"told": [row.told.step, row.told.generate, row.told.train]} for row in rows]
    save("hours", {"conditions": told, "rows": content}, text + under(told, "wall time, one core for each role"))


if __name__ == "__main__":
    main()
