"""Rollout rows at rest: one Parquet file a step, read back for replay, reports and re-scoring.

The columns are those of rollout.schema, except that `reward_parts` is a list of {name, value}: `datasets` and others
cannot read maps.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.files import writing
from rollout.schema import SCHEMA, check

PARTS = "reward_parts"
PARTS_AT_REST = pa.list_(pa.struct([pa.field("name", pa.string(), nullable=False), pa.field("value", pa.float32())]))


def write(folder: Path, step: int, groups: Sequence[pa.Table]) -> Path:
    """The groups that a step consumed, as folder/step-000012.parquet; visible only when whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.parquet"
    partial = path.with_suffix(".partial")
    with writing(partial):
        pq.write_table(_at_rest(pa.concat_tables(groups).combine_chunks()), partial)  # a chunk a group costs more
    os.replace(partial, path)
    return path


def read(path: Path) -> pa.Table:
    """One step file as a table of rollout.schema. Files of earlier versions, with maps, are read too. Raises
    ValueError."""
    return check(_as_sent(pq.read_table(path)))


def steps(folder: Path) -> list[Path]:
    """Every step file of a `rollouts/` folder, oldest first."""
    return sorted(path for path in folder.glob("step-*.parquet") if re.fullmatch(r"step-\d{6,}", path.stem))


def forget_after(folder: Path, step: int) -> None:
    """Deletes the files of steps that a resumed run takes again."""
    for path in steps(folder):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()


def _at_rest(rows: pa.Table) -> pa.Table:
    field = pa.field(PARTS, PARTS_AT_REST, nullable=False)
    return rows.set_column(rows.schema.get_field_index(PARTS), field, rows.column(PARTS).cast(PARTS_AT_REST))


def _as_sent(rows: pa.Table) -> pa.Table:
    index = rows.schema.get_field_index(PARTS)
    found = rows.schema.field(index).type if index >= 0 else pa.null()
    if not pa.types.is_list(found) or found.value_type != PARTS_AT_REST.value_type:
        return rows  # a map already, or no rollouts: `check` tells
    maps = [
        pa.MapArray.from_arrays(chunk.offsets, chunk.values.field("name"), chunk.values.field("value"))
        for chunk in rows.column(index).chunks
    ]
    field = SCHEMA.field(PARTS)
    return rows.set_column(index, field, pa.chunked_array(maps, type=field.type))
