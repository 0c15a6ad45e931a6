"""Rollout rows at rest: one Parquet file a step, read back for replay, reports and re-scoring.

The columns are those of rollout.schema. Files of its version 1, which knew no turns, are read as trajectories of one
completion each; those of versions 1 and 2 say that a reward function failed, and not its words.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.errors import WrongInput
from cluster.files import fsync, writing
from cluster.reading import opened
from rollout.schema import SCHEMA, check, check_rows

MOST = 2**32  # bytes of a step's rows in memory
TEXT = "BYTE_ARRAY"
NEW_IN_4 = ("logged",)
NEW_IN_3 = ("reward_error", *NEW_IN_4)
NEW_IN_2 = ("loss_mask", "turns", "messages", "env_metrics")  # and reward_parts was a map in flight
SINCE = {
    b"1": (*NEW_IN_2, *NEW_IN_3),
    b"2": NEW_IN_3,
    b"3": NEW_IN_4,
}  # an older version -> the columns that it has not


def write(folder: Path, step: int, groups: Sequence[pa.Table]) -> Path:
    """The groups that a step consumed, as folder/step-000012.parquet; visible only when whole."""
    path = folder / f"step-{step:06d}.parquet"
    partial = path.with_suffix(".partial")
    with writing(partial):
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.concat_tables(groups).combine_chunks(), partial)  # a chunk a group costs more
        os.replace(partial, path)
    return path


def settle(folder: Path, step: int) -> None:
    """Puts the files of steps after this one on the disk, so that they survive a power cut."""
    new = [path for path in steps(folder) if int(path.stem.removeprefix("step-")) > step]
    for path in new:
        fsync(path)
    if new:
        fsync(folder)


def read(path: Path) -> pa.Table:
    """One step file as a table of rollout.schema, whose rows are whole (rollout.schema.check_rows); files of older
    versions are read too. Raises OSError or ValueError (pa.ArrowException)."""
    return check_rows(check(_of_today(read_table(path))))


def read_table(path: Path) -> pa.Table:
    """A Parquet file that somebody else may have made. Raises OSError or ValueError (pa.ArrowException)."""
    with opened(path) as stream:
        file = pq.ParquetFile(stream)
        _check_size(path, file)
        table = file.read(use_threads=False)  # as fast for a step's few rows
        table.validate(full=True)  # offsets, and that text is UTF-8
        return table


def _check_size(path: Path, file: pq.ParquetFile) -> None:
    """Raises WrongInput for a file whose columns would take more memory than MOST. A few bytes of Parquet may stand for
    billions of values, or for a long text once for each of many rows."""
    told = file.metadata
    columns = range(told.num_columns)
    chunks = [told.row_group(i).column(j) for i in range(told.num_row_groups) for j in columns]
    if 8 * sum(one.num_values for one in chunks) > MOST:
        raise WrongInput(f"{path} must take at most {MOST // 2**20:,} MiB in memory, and takes more")
    # No text is longer than its chunk, whose size is that of what is not repeated.
    if sum(one.num_values * one.total_uncompressed_size for one in chunks if one.physical_type == TEXT) <= MOST:
        return
    texts = [told.schema.column(j).path for j in columns if told.schema.column(j).physical_type == TEXT]
    taken = 0
    for batch in file.iter_batches(batch_size=64, columns=texts):
        taken += batch.nbytes
        if taken > MOST:
            raise WrongInput(f"{path} must take at most {MOST // 2**20:,} MiB in memory, and takes more")


def steps(folder: Path) -> list[Path]:
    """Every step file of a `rollouts/` folder, oldest first."""
    return sorted(path for path in folder.glob("step-*.parquet") if re.fullmatch(r"step-\d{6,}", path.stem))


def forget_after(folder: Path, step: int) -> None:
    """Deletes the files of steps that a resumed run takes again."""
    for path in steps(folder):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()


def _of_today(rows: pa.Table) -> pa.Table:
    """A whole table of an older version in the columns of today; any other as it is, for `check` to judge."""
    version = (rows.schema.metadata or {}).get(b"gleaner.schema", b"")
    new = SINCE.get(version, ())
    if not new or {*rows.column_names, *new} != {*SCHEMA.names}:
        return rows
    values: dict[str, Any] = {name: [None if SCHEMA.field(name).nullable else []] * len(rows) for name in new}
    if version == b"1":
        values["reward_parts"] = rows.column("reward_parts").to_pylist()  # pairs in flight, structs at rest
    made = {name: pa.array(column, SCHEMA.field(name).type) for name, column in values.items()}
    return pa.table({name: made[name] if name in made else rows.column(name) for name in SCHEMA.names}, schema=SCHEMA)
