"""A run as a user starts it, and what its ledger says of every trajectory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import as_table
from benchmarks.system.system_run import command
from benchmarks.system.workloads import Tree
from rollout import ledger
from rollout.schema import parts_of


def small_run(folder: Path, data: str, steps: int, seed: int) -> Tree:
    """What such runs have in common: the model at folder/model, the problems in a file there, nothing held out."""
    return {
        "steps": steps,
        "seed": seed,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"path": str(folder / data), "prompt": "prompt", "eval": {"every": 0}},
        "trackers": [],
    }


def played(tree: Tree, folder: Path, limit_s: float) -> list[dict[str, Any]]:
    """Runs the configuration under folder and reads its ledger back -> a dict for each trajectory: where it stood, how
    it ended, its reward and the parts of that, its turns, and how many of its tokens were sampled. Raises RunFailed."""
    whole = tree | {"name": "run", "output_dir": str(folder)}
    command(whole, ["-m", "learner.main", "--config"], [], limit_s)
    return [one for path in ledger.steps(folder / "run" / "rollouts") for one in _read(path)]


def _read(path: Path) -> list[dict[str, Any]]:
    table, told = ledger.read(path), []
    for row, parts in zip(table.to_pylist(), parts_of(table), strict=True):
        turns = [(turn["start"], turn["stop"]) for turn in row["turns"]]
        mask = [any(start <= place < stop for start, stop in turns) for place in range(len(row["completion_ids"]))]
        assert mask == row["loss_mask"], "the mask must be true on the turns and nowhere else"
        told.append({
            "step": int(path.stem.rpartition("-")[2]), "problem": row["problem_id"],
            "sample": row["sample"], "outcome": row["finish_reason"], "reward": row["reward"], "parts": parts,
            "turns": turns, "sampled": sum(mask), "tokens": len(mask), "versions": sorted(set(row["token_versions"])),
            "env_ms": [round(turn["env_ms"]) for turn in row["turns"]], "messages": json.loads(row["messages"]),
        })  # fmt: skip
    return told


def table(found: Sequence[dict[str, Any]]) -> str:
    """A row for each trajectory, as Markdown."""
    header = ["step", "problem", "sample", "outcome", "reward", "parts", "turns at", "tokens sampled", "policy version"]
    rows = [
        [
            str(one["step"]), one["problem"], str(one["sample"]), one["outcome"], _number(one["reward"]),
            ", ".join(f"{name} {_number(value)}" for name, value in one["parts"].items()),
            ", ".join(f"{start}-{stop}" for start, stop in one["turns"]), f"{one['sampled']} of {one['tokens']}",
            ", ".join(map(str, one["versions"])),
        ]
        for one in found
    ]  # fmt: skip
    return as_table(header, rows)


def conversation(one: dict[str, Any]) -> str:
    """What was said in a trajectory after its prompt, as Markdown."""
    said = "\n".join(json.dumps(message, ensure_ascii=False) for message in one["messages"])
    return f"Step {one['step']}, {one['problem']}, sample {one['sample']}:\n\n```\n{said}\n```"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
