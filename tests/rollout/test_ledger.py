"""Rollouts at rest: read by others' tools, and by this project also where an older version wrote them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout import ledger
from rollout.fakes import make_group
from rollout.schema import SCHEMA, parts_of

PARTS = [[("format", 0.5), ("answer", None)], [], [("format", 1.0)]]


def group(position: int = 0) -> pa.Table:
    return make_group(position, rewards=(1.0, None, 0.25), reward_parts=PARTS)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("offline")
def test_datasets_reads_rollouts(tmp_path: Path) -> None:
    import datasets

    for step in (1, 2):
        ledger.write(tmp_path / "rollouts", step, [group(step), group(step + 1)])
    rows: Any = datasets.load_dataset("parquet", data_dir=str(tmp_path / "rollouts"), split="train")
    assert len(rows) == 12
    assert rows[0]["reward_parts"] == [{"name": "format", "value": 0.5}, {"name": "answer", "value": None}]
    assert rows["reward"][:3] == [1.0, None, 0.25]
    assert [rows[i]["reward_parts"] for i in (1, 2)] == [[], [{"name": "format", "value": 1.0}]]


def test_what_is_read_is_what_was_sent(tmp_path: Path) -> None:
    sent = pa.concat_tables([group(0), group(1)])
    for rows in (sent, sent.slice(1, 4)):  # a slice keeps the values before it
        read = ledger.read(ledger.write(tmp_path, 1, [rows]))
        assert read.equals(rows)
        assert parts_of(read) == parts_of(rows)


@pytest.mark.parametrize("type_of_parts", [pa.map_(pa.string(), pa.float32()), SCHEMA.field("reward_parts").type])
def test_rollouts_of_version_1_are_read(type_of_parts: pa.DataType, tmp_path: Path) -> None:
    """It had maps in flight and, for a while, at rest."""
    first = group().drop_columns(list(ledger.SINCE[b"1"]))
    place = first.schema.get_field_index("reward_parts")
    first = first.set_column(
        place, pa.field("reward_parts", type_of_parts, nullable=False), pa.array(PARTS, type_of_parts)
    )
    old = tmp_path / "step-000001.parquet"
    pq.write_table(first.replace_schema_metadata({"gleaner.schema": "1"}), old)
    assert ledger.read(old).equals(group())


@pytest.mark.parametrize("version", ["2", "3", "4", "5", "6"])
def test_rollouts_of_versions_2_to_6_are_read(version: str, tmp_path: Path) -> None:
    old = tmp_path / "step-000001.parquet"
    without = group().drop_columns(list(ledger.SINCE[version.encode()]))
    pq.write_table(without.replace_schema_metadata({"gleaner.schema": version}), old)
    assert ledger.read(old).equals(group())


def test_what_is_not_whole_of_version_1_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step-000001.parquet"
    pq.write_table(group().drop_columns(["seed"]).replace_schema_metadata({"gleaner.schema": "1"}), path)
    with pytest.raises(ValueError, match="must be 7, got 1"):
        ledger.read(path)


def test_a_file_that_holds_no_rollouts_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "step-000001.parquet"
    pq.write_table(pa.table({"reward_parts": [[1.0]], "x": [1]}), other)
    with pytest.raises(ValueError, match="schema version must be 7, got none"):
        ledger.read(other)
