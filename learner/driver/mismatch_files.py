"""mismatch/ of a run: of each step, by how much the learner's logprob of each token differs from the sampler's.

A file beside that of the step's rollouts, since the learner alone knows it, and only after the step. Facts of rollouts
go to disk before. float16: a difference of 1e-6 nats is still known to 3 %.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.files import writing
from rollout import ledger

FOLDER = "mismatch"
SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("mismatch", pa.list_(pa.float16())),  # [T] nats, nan of an observation; null: not trained on
    ]
)


def write(run_dir: Path, step: int, groups: Sequence[pa.Table], mismatch: pa.Array) -> Path:
    """The file of a step. groups: those that the learner was given. mismatch: a list for each row of theirs
    (learner.trainer.service.TrainerService.mismatch)."""
    folder = run_dir / FOLDER
    rows = pa.concat_tables([group.select(SCHEMA.names[:2]) for group in groups])
    path = folder / f"step-{step:06d}.parquet"
    partial = path.with_suffix(".partial")
    with writing(partial):
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table([*rows.columns, mismatch], schema=SCHEMA), partial)
        os.replace(partial, path)
    return path


def read(path: Path) -> dict[str, list[list[float] | None]]:
    """group_id -> of each of its rows the [T] differences in nats. Raises OSError or ValueError (pa.ArrowException)."""
    rows = ledger.read_table(path)
    if not rows.schema.equals(SCHEMA):
        raise ValueError(f"{path.name}: columns must be {', '.join(SCHEMA.names)}, got {', '.join(rows.column_names)}")
    found: dict[str, list[list[float] | None]] = {}
    for group, values in zip(rows.column("group_id").to_pylist(), rows.column("mismatch").to_pylist(), strict=True):
        found.setdefault(group, []).append(values)
    return found


def forget_after(run_dir: Path, step: int) -> None:
    """Deletes the files of steps that a resumed run takes again."""
    ledger.forget_after(run_dir / FOLDER, step)
