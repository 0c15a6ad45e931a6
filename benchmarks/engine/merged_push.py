"""learner.push merged against adapter: what generating without LoRA gains, and what the larger push costs.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.merged_push

On the ragged workload (a Llama of 25M weights) and on the demo, in turns: synchronous; asynchronous where completions
under way finish, for which merged weights drain the generator; and where they continue. A ratio is of runs of one turn.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common import as_table, conditions, save
from benchmarks.system.system_run import BOTH, Mode, Record, parts_of, run_gleaner, spread, wall_text
from benchmarks.system.workloads import Tree, add_ragged_options, demo_of_one, ragged

WAYS = {"sync": Mode(0, 1, 1), "async, finish": Mode(1, 1, 1), "async, continue": Mode(1, 1, 1, "continue")}
PUSHES = ("adapter", "merged")


def turns(tree: Tree, options: argparse.Namespace) -> Iterator[Record]:
    """Per seed and way a run of each push, named for both."""
    for seed in range(options.repeats):
        for way in options.ways:
            for push in PUSHES:
                own = tree | {"seed": seed, "learner": tree["learner"] | {"push": push}}
                record = replace(run_gleaner(own, WAYS[way], options.limit), system=f"{way}: {push}")
                rate = f"{record.rate(options.skip):.2f} samples/s, load before {record.load:.1f}"
                print(f"{record.system}, {record.dtype}, seed {seed}: {record.wall_s:.0f} s, {rate}", flush=True)
                yield record


def table(records: Sequence[Record], options: argparse.Namespace) -> str:
    """Rates, merged over adapter, and seconds of a step: export (the learner builds what is sent) and push (it travels,
    is loaded and proven)."""
    skip, rows = options.skip, []
    for dtype in dict.fromkeys(record.dtype for record in records):
        for way in options.ways:
            runs = {push: [r for r in records if (r.dtype, r.system) == (dtype, f"{way}: {push}")] for push in PUSHES}
            pairs = zip(runs["adapter"], runs["merged"], strict=True)
            ratio = spread([merged.rate(skip) / adapter.rate(skip) for adapter, merged in pairs])
            for push, own in runs.items():
                parts = parts_of(own, skip, ("seconds", "generate", "train", "push_export", "push"), ".3f")
                rows.append([way, push, dtype, spread([r.rate(skip) for r in own]),
                             f"{ratio} x" if push == "merged" else "", *parts])  # fmt: skip
    header = ["", "push", "type", "samples/s", "to adapter", "s per step", "generate", "train", "export", "push"]
    return as_table(header, rows)


def report(found: dict[str, list[Record]], told: dict[str, Any], options: argparse.Namespace) -> str:
    every = [record for records in found.values() for record in records]
    parts = [f"## {name}\n\n{table(records, options)}\n\n" for name, records in found.items()]
    return (
        f"# learner.push: merged against adapter\n\n{''.join(parts)}"
        f"Median (least - most) of {options.repeats} runs, which took turns, a core for each role; steps after "
        f"{options.skip} to warm up. ragged: a Llama of 25M random weights, prompts of 200 to 400 tokens, "
        f"{options.groups} groups of {options.generations} completions a step, each token the last with probability "
        f"{options.end_rate:g}, at most {options.completion} tokens, {options.steps} steps. demo: "
        f"`configs/local_cpu.yaml` with one generator, {options.demo_steps} steps.\n\n"
        f"Conditions: {wall_text(told, every)}\n"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_ragged_options(parser)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--workloads", nargs="+", choices=["ragged", "demo"], default=["ragged", "demo"])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each")
    parser.add_argument("--demo-steps", type=int, default=30)
    parser.add_argument("--limit", type=float, default=7200, help="seconds after which a run has failed")
    return parser.parse_args()


def main() -> None:
    options, told = parse(), conditions(BOTH)
    found: dict[str, list[Record]] = {name: [] for name in options.workloads}
    with tempfile.TemporaryDirectory() as folder:
        if "ragged" in found:
            tree = ragged(Path(folder), options)
            for dtype in options.dtype:
                found["ragged"] += turns(tree | {"model": tree["model"] | {"dtype": dtype}}, options)
    if "demo" in found:
        found["demo"] += turns(demo_of_one(options.demo_steps, every=0), options)
    runs = {name: [asdict(record) for record in records] for name, records in found.items()}
    save("merged_push", {"conditions": told, "runs": runs}, report(found, told, options))


if __name__ == "__main__":
    main()
