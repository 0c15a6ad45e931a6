"""What a run folder tells of the groups of a run: which were trained, which were lost."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl so far, without a line that is still being written."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def trained(run_dir: Path) -> list[tuple[int, int, int, int]]:
    """Groups of the ledger: step, position in the stream, attempt, generator."""
    found = set()
    for file in sorted((run_dir / "rollouts").glob("step-*.parquet")):
        table = pq.read_table(file, columns=["group_id", "position", "worker"])
        for name, position, worker in zip(*(table.column(c).to_pylist() for c in table.column_names), strict=True):
            found.add((int(file.stem[5:]), position, int(name.rpartition("-")[2]), worker))
    return sorted(found)


def counted(run_dir: Path) -> dict[str, int]:
    """Lost: positions before the last one trained that are in no batch. Doubled: those that are in two."""
    steps, groups = rows(run_dir), trained(run_dir)
    times = Counter(position for _, position, _, _ in groups)
    return {
        "steps": steps[-1]["step"],
        "trained": len(groups),
        "reissued": sum(attempt > 0 for _, _, attempt, _ in groups),
        "dropped": round(sum(row.get("buffer/dropped_stale", 0.0) for row in steps)),
        "lost": len(set(range(max(times) + 1)) - set(times)),
        "doubled": sum(count > 1 for count in times.values()),
    }
