"""The whole system against TRL's GRPOTrainer, and in its own modes: one model, the same problems, rewards, LoRA and
number of samples.

    pip install --no-deps --target build/rivals -r benchmarks/requirements.txt
    PYTHONPATH=.:build/rivals .venv/bin/python -m benchmarks.system.system_vs_trl --dtype float32 bfloat16
    PYTHONPATH=.:build/rivals .venv/bin/python -m benchmarks.system.system_vs_trl --rivals vllm --modes 1:1/1
    PYTHONPATH=.:build/rivals .venv/bin/python -m benchmarks.system.system_vs_trl --workload demo
    PYTHONPATH=. .venv/bin/python -m benchmarks.system.system_vs_trl --rivals --modes 0:2/2 1:1/1 2:1/1

TRL generates with Hugging Face's generate, or (`--rivals vllm`, the harder one) with vLLM in its own process. Without a
rival the modes are compared with the first of them: on equal hardware generation and training that take turns have both
cores each (0:2/2), those that run at once have one each (1:1/1).

ragged compares samples per second, demo the seconds of training to a held-out accuracy. Each run is a fresh process of
`python -m learner.main` or of benchmarks.system.trl_system; they take turns, repeat by repeat, so a ratio is of
neighbours.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.common import RESULTS, ROOT, as_table, conditions, installed, parser_of, save, spread
from benchmarks.system.system_run import (
    ABOUT_REAL,
    BOTH,
    RIVALS,
    Mode,
    Record,
    Tree,
    about_ragged,
    add_ragged_options,
    demo,
    lengths_table,
    parts_of,
    ragged,
    real,
    run_gleaner,
    run_trl,
    wall_text,
)

KEPT = ROOT / "build" / "system_runs.jsonl"  # every run of every call, one a line
IDLE = ("generator_idle", "learner_idle")
PARTS = (("generate", "tab:green"), ("train", "tab:blue"), ("other", "lightgray"))
ABOUT = {
    "generate": (
        "TRL 1.16 runs as it comes: Hugging Face's generate on all cores (its `use_vllm` is made for GPUs), "
        "one update per batch, no checkpointing of activations, its own logging off. Without Triton it scores prompts "
        "too, which it does not on CUDA: **TRL on a CPU is not TRL on a GPU**. "
    ),
    "vllm": (
        "TRL with vLLM: `rollout_func` asks vLLM in the trainer's process, prefix cache on, all cores, the merged "
        "weights loaded before each step, as TRL does on a card (benchmarks/system/trl_system.py). "
    ),
}


def take_turns(tree: Tree, options: argparse.Namespace) -> list[Record]:
    """Per seed a run of each system; every one is printed as it ends."""
    records = []
    for seed in range(options.repeats):
        own = tree | {"seed": seed}
        runs: list[Callable[[], Record]] = [
            *(partial(run_trl, own, options.micro_batch, engine, options.limit) for engine in options.rivals),
            *(partial(run_gleaner, own, mode, options.limit) for mode in options.modes),
        ]
        for run in runs:
            record = run()
            print(f"{record.system}, {record.dtype}, seed {seed}: {record.wall_s:.0f} s, start {record.start_s:.1f} s,",
                  f"{record.rate(options.skip):.2f} samples/s, load before {record.load:.1f}", flush=True)  # fmt: skip
            records.append(record)
            KEPT.parent.mkdir(exist_ok=True)
            with KEPT.open("a") as file:  # hours of runs must not be lost by the failure of a later one
                file.write(json.dumps(asdict(record)) + "\n")
    return records


def by_system(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """(system, type) -> its runs, in the order of the seeds."""
    keys = dict.fromkeys((record.system, record.dtype) for record in records)
    return {key: [record for record in records if (record.system, record.dtype) == key] for key in keys}


def references(options: argparse.Namespace) -> list[str]:
    """The systems with which the others are compared."""
    return [RIVALS[engine] for engine in options.rivals] or [options.modes[0].name]


def _ratio(own: Sequence[Record], others: Sequence[Record], skip: int) -> str:
    return f"{spread([a.rate(skip) / b.rate(skip) for a, b in zip(own, others, strict=True)])} x"


def _idle(own: Sequence[Record], skip: int) -> list[str]:
    """Per cent of a step in which each role waits; TRL tells nothing of that."""
    if own[0].system in RIVALS.values():
        return ["-"] * len(IDLE)
    return [spread([100 * r.mean(skip, name) / r.mean(skip, "seconds") for r in own], ".0f") for name in IDLE]


def ragged_report(records: Sequence[Record], options: argparse.Namespace) -> str:
    found, skip, rows, real_model = by_system(records), options.skip, [], options.workload == "real"
    for (system, dtype), own in found.items():
        ratios = ["-" if system == name else _ratio(own, found[name, dtype], skip) for name in references(options)]
        rows.append([system, dtype, spread([r.rate(skip) for r in own]), spread([r.rate(skip, "tokens") for r in own],
                     ".0f"), *ratios, *_idle(own, skip), *parts_of(own, skip, ("seconds", "generate", "train",
                     "overlap")), spread([r.other(skip) for r in own]),
                     spread([r.start_s for r in own], ".1f")])  # fmt: skip
    header = ["system", "type", "samples/s", "tokens/s", *(f"ratio to {name}" for name in references(options)),
              "generator idle %", "learner idle %", "s per step", "generate", "train", "both", "other",
              "start-up s"]  # fmt: skip
    return (
        f"# Whole systems: {'a real model' if real_model else 'ragged completions'}\n\n"
        f"{as_table(header, rows)}\n\n"
        f"{ABOUT_REAL if real_model else about_ragged(options)} LoRA r = {32 if real_model else 16} on all linear "
        f"layers, dapo loss, AdamW. Median (least - most) of {options.repeats} runs, which took turns; a figure of a "
        f"run is that of {options.steps} steps after {options.skip} to warm up; a ratio is of runs of one turn."
    )


def demo_report(records: Sequence[Record], options: argparse.Namespace) -> str:
    def shown(seconds: float | None) -> str:
        return "not reached" if seconds is None else f"{seconds:.1f}"

    first = references(options)[0]
    others = {record.seed: record.seconds_to(options.accuracy) for record in records if record.system == first}
    rows = []
    for record in records:
        own, other = record.seconds_to(options.accuracy), others.get(record.seed)
        ratio = f"{own / other:.2f} x" if own and other and record.system not in references(options) else "-"
        accuracies = [f"{score:.3f}" for _, score in (record.accuracy[0], record.accuracy[-1])]
        parts = [f"{record.mean(options.skip, what):.2f}" for what in ("generate", "train")]
        rows.append([record.system, str(record.seed), shown(own), ratio, *accuracies,
                     f"{record.rate(options.skip):.1f}", *parts, f"{record.other(options.skip):.2f}",
                     f"{record.start_s:.1f}", f"{record.wall_s:.0f}"])  # fmt: skip
    header = ["system", "seed", f"s to {options.accuracy:g}", f"time against {first}", "first",
              "last accuracy", "samples/s", "generate s", "train s", "other s", "start-up s", "wall s"]  # fmt: skip
    return (
        f"# Whole systems: the demo, seconds to a held-out accuracy of {options.accuracy:g}\n\n"
        f"{as_table(header, rows)}\n\n"
        "`configs/local_cpu.yaml`: a model of 0.4M weights, 8 groups of 8 short completions a step, "
        f"{options.demo_steps} steps, 200 held-out problems answered greedily every {options.every} steps, which is "
        "the grain of the seconds. They are of training: start-up and evaluation are left out on both sides. gleaner "
        "has two generators and gives them merged weights, as the file says; cores are of each process. It generates "
        "its next batch during an evaluation; steps that may have gained from one are charged at least the median of "
        "the others. Parts are seconds of a step, of which generation and training may overlap."
    )


def picture(records: Sequence[Record], options: argparse.Namespace, file: Path) -> None:
    """Samples per second of each system, a bar of the median and a dot for each run; and what a step's seconds went
    into: where both roles work at once, their bars together exceed the step's line."""
    from matplotlib.figure import Figure

    found, skip = by_system(records), options.skip
    figure = Figure(figsize=(11, 1.6 + 0.6 * len(found)), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row, own in enumerate(found.values()):
        rates = [record.rate(skip) for record in own]
        left.barh(row, median(rates), color="tab:blue", alpha=0.7)
        left.plot(rates, [row] * len(rates), "k.", markersize=5)
        left.text(max(rates), row, f"  {median(rates):.2f}", va="center")
        begin = 0.0
        for part, colour in PARTS:
            seconds = median([r.other(skip) if part == "other" else r.mean(skip, part) for r in own])
            right.barh(row, seconds, left=begin, color=colour, label=part if row == 0 else None)
            begin += seconds
        step = median([record.mean(skip, "seconds") for record in own])
        right.plot([step, step], [row - 0.42, row + 0.42], "k-", label="the step" if row == 0 else None)
    left.set_yticks(range(len(found)), [f"{system}\n{dtype}" for system, dtype in found])
    left.set_xlim(0, left.get_xlim()[1] * 1.15)
    left.set_xlabel("samples per second")
    right.set_yticks([])
    right.set_xlabel("seconds per step, by part")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.invert_yaxis()
    figure.savefig(file, dpi=140)


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--workload", choices=["ragged", "real", "demo"], default="ragged")
    add_ragged_options(parser)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system, with seeds 0, 1, ...")
    parser.add_argument(
        "--modes", type=Mode.parse, nargs="+", help="of gleaner: STALENESS:GENERATOR/LEARNER cores[xRANKS][:continue]"
    )
    parser.add_argument("--rivals", choices=list(RIVALS), nargs="*", default=["generate"], help="engines of TRL")
    parser.add_argument("--micro-batch", type=int, help="of TRL; completions; default 16, demo 64")
    parser.add_argument("--limit", type=float, default=7200, help="seconds after which a run has failed")
    parser.add_argument("--demo-steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="demo: steps between evaluations")
    parser.add_argument("--accuracy", type=float, default=0.85, help="demo: what is to be reached")
    parser.add_argument("--name", help="of the result")
    options = parser.parse_args()
    options.modes = options.modes or [Mode(0, 2, 2), Mode(1, 1, 1)]
    of_demo = options.workload == "demo"
    if options.workload == "real":
        options.groups, options.generations = 4, 8
    options.micro_batch = options.micro_batch or (64 if of_demo else 16)
    options.name = options.name or f"system_vs_trl{'_vllm' * ('vllm' in options.rivals)}_{options.workload}"
    samples = 64 if of_demo else options.groups * options.generations
    if options.rivals and samples % options.micro_batch:
        parser.error(f"--micro-batch must divide the {samples} completions of a step, got {options.micro_batch}")
    if of_demo and options.every <= 1 + max(mode.staleness for mode in options.modes):
        parser.error(f"--every must leave steps without an evaluation or a gain from one, got {options.every}")
    if options.rivals and not installed("trl"):
        parser.error("TRL is not installed; see benchmarks/requirements.txt, or pass --rivals without a name")
    return options


def main() -> None:
    options, told, records = parse(), conditions(BOTH), list[Record]()
    if options.workload == "demo":
        records, report = take_turns(demo(options.demo_steps, options.every), options), demo_report
    elif options.workload == "real":
        report = ragged_report
        for dtype in options.dtype:
            records += take_turns(real(options.steps + options.skip, dtype), options)
    else:
        report = ragged_report
        with tempfile.TemporaryDirectory() as folder:
            tree = ragged(Path(folder), options)
            for dtype in options.dtype:
                records += take_turns(tree | {"model": tree["model"] | {"dtype": dtype}}, options)
    about = "".join(ABOUT[engine] for engine in options.rivals)
    about += f"Micro-batches of TRL: {options.micro_batch}.\n\n" * bool(options.rivals)
    text = f"{report(records, options)}\n\n{lengths_table(records)}\n\n{about}Conditions: {wall_text(told, records)}"
    save(options.name, {"conditions": told, "runs": [asdict(record) for record in records]}, text)
    if options.workload != "demo":
        picture(records, options, RESULTS / f"{options.name}.png")


if __name__ == "__main__":
    main()
