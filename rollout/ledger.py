"""The ledger: writes the groups of each step to a Parquet file, and reads them for replay, reports and re-scoring.

The columns are those of rollout.schema, and files of its older versions can be read, too. Files of version 1, which had
no turns, are read as single completions; files of versions 1 and 2 lack the messages of failed reward functions.
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

MOST = 2**32  # greatest size of a step's rows in memory, bytes
TEXT = "BYTE_ARRAY"
NEW_IN_7 = ("teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs")
NEW_IN_6 = ("teacher_prompt_ids", *NEW_IN_7)
NEW_IN_5 = ("routed_experts", *NEW_IN_6)
NEW_IN_4 = ("logged", *NEW_IN_5)
NEW_IN_3 = ("reward_error", *NEW_IN_4)
NEW_IN_2 = ("loss_mask", "turns", "messages", "env_metrics")  # version 1 also had reward_parts as a map
SINCE = {
    b"1": (*NEW_IN_2, *NEW_IN_3),
    b"2": NEW_IN_3,
    b"3": NEW_IN_4,
    b"4": NEW_IN_5,
    b"5": NEW_IN_6,
    b"6": NEW_IN_7,
}  # an older version -> the columns that it lacks


def write(folder: Path, step: int, groups: Sequence[pa.Table]) -> Path:
    """Writes the groups that a step consumed to e.g. folder/step-000012.parquet, which appears only when complete."""
    path = folder / f"step-{step:06d}.parquet"
    partial = path.with_suffix(".partial")
    with writing(partial):
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.concat_tables(groups).combine_chunks(), partial)  # one chunk for each group costs more
        os.replace(partial, path)
    return path


def settle(folder: Path, step: int) -> None:
    """Syncs the files of steps after `step` to the disk, so that they survive a power cut."""
    new = [path for path in steps(folder) if int(path.stem.removeprefix("step-")) > step]
    for path in new:
        fsync(path)
    if new:
        fsync(folder)


def read(path: Path) -> pa.Table:
    """The table of one step's file, of any schema version, whose rows are checked (rollout.schema.check_rows).

    Raises OSError or ValueError (pa.ArrowException).
    """
    return check_rows(check(_of_today(read_table(path))))


def read_table(path: Path) -> pa.Table:
    """Reads and validates a Parquet file, which may come from an untrusted source. Raises OSError or ValueError
    (pa.ArrowException)."""
    with opened(path) as stream:
        file = pq.ParquetFile(stream)
        _check_size(path, file)
        table = file.read(use_threads=False)  # a step has so few rows that threads make it no faster
        table.validate(full=True)  # checks offsets, and that text is UTF-8
        return table


def _check_size(path: Path, file: pq.ParquetFile) -> None:
    """Raises WrongInput for a file whose columns would take more memory than MOST: a few bytes of Parquet may stand for
    billions of values, or for a long text that many rows repeat."""
    told = file.metadata
    columns = range(told.num_columns)
    chunks = [told.row_group(i).column(j) for i in range(told.num_row_groups) for j in columns]
    if 8 * sum(one.num_values for one in chunks) > MOST:
        raise WrongInput(f"{path} must take at most {MOST // 2**20:,} MiB in memory, and takes more")
    # No text is longer than its column chunk, in whose size repeated values count once.
    if sum(one.num_values * one.total_uncompressed_size for one in chunks if one.physical_type == TEXT) <= MOST:
        return
    texts = [told.schema.column(j).path for j in columns if told.schema.column(j).physical_type == TEXT]
    taken = 0
    for batch in file.iter_batches(batch_size=64, columns=texts):
        taken += batch.nbytes
        if taken > MOST:
            raise WrongInput(f"{path} must take at most {MOST // 2**20:,} MiB in memory, and takes more")


def steps(folder: Path) -> list[Path]:
    """The steps' files in a folder `rollouts/`, the oldest step first."""
    return sorted(path for path in folder.glob("step-*.parquet") if re.fullmatch(r"step-\d{6,}", path.stem))


def forget_after(folder: Path, step: int) -> None:
    """Deletes the files of steps after `step`, which a resumed run will take again."""
    for path in steps(folder):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()


def _of_today(rows: pa.Table) -> pa.Table:
    """Converts a complete table of an older version to today's columns; returns any other unchanged, for `check`."""
    version = (rows.schema.metadata or {}).get(b"gleaner.schema", b"")
    new = SINCE.get(version, ())
    if not new or {*rows.column_names, *new} != {*SCHEMA.names}:
        return rows
    values: dict[str, Any] = {name: [None if SCHEMA.field(name).nullable else []] * len(rows) for name in new}
    if version == b"1":
        values["reward_parts"] = rows.column("reward_parts").to_pylist()  # a map's pairs, which become structs
    made = {name: pa.array(column, SCHEMA.field(name).type) for name, column in values.items()}
    return pa.table({name: made[name] if name in made else rows.column(name) for name in SCHEMA.names}, schema=SCHEMA)
