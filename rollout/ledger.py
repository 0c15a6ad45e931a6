"""Rollout rows at rest: one Parquet file a step, read back for replay, reports and re-scoring."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.files import writing
from rollout.schema import check


def write(folder: Path, step: int, groups: Sequence[pa.Table]) -> Path:
    """The groups that a step consumed, as folder/step-000012.parquet; visible only when whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.parquet"
    partial = path.with_suffix(".partial")
    with writing(partial):
        pq.write_table(pa.concat_tables(groups).combine_chunks(), partial)  # a chunk for each group costs more
    os.replace(partial, path)
    return path


def read(path: Path) -> pa.Table:
    """One step file, checked against the schema."""
    return check(pq.read_table(path))


def steps(folder: Path) -> list[Path]:
    """Every step file of a `rollouts/` folder, oldest first."""
    return sorted(path for path in folder.glob("step-*.parquet") if re.fullmatch(r"step-\d{6,}", path.stem))


def forget_after(folder: Path, step: int) -> None:
    """Deletes the files of steps that a resumed run takes again."""
    for path in steps(folder):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()
