"""docs/trl_tests.md: each test of TRL's has a row, and what shows the same here is a test of ours that is there."""

import re
from collections import Counter

import pytest

from tests.trl_tests import FILES, PAGE, Row, named_in, rows

ROOT = PAGE.parents[1]
KINDS = ("same", "other name", "refused", "not here")
SHOWN = re.compile(r"`([\w/]+\.py)::(\w+)`")


@pytest.mark.parametrize(("file", "size"), [("test_grpo_trainer.py", 116), ("test_rewards.py", 38)])
def test_each_has_one_row_and_the_counts_are_those_of_the_rows(file: str, size: int) -> None:
    found = rows(file)
    assert len({row.name for row in found}) == len(found) == size
    counts = Counter(row.kind for row in found)
    told = re.search(rf"^\| \[{file}\]\(.*\) ((?:\| \d+ )+)\|$", PAGE.read_text(), re.MULTILINE)
    assert told is not None
    assert [int(n) for n in re.findall(r"\d+", told[1])] == [*(counts[kind] for kind in KINDS), size]
    assert set(counts) <= set(KINDS)
    assert [row.name for row in found if row.kind != "same" and not row.reason] == []


def wrong(row: Row) -> list[str]:
    """What its last column names that is not there."""
    named = SHOWN.findall(row.shown)
    lost = [
        f"{file}::{test}" for file, test in named if not (ROOT / file).is_file() or test not in named_in(ROOT / file)
    ]
    rest = SHOWN.sub("", row.shown).replace(",", "").strip()
    return lost + ([rest] if rest or not named else [])


def test_what_shows_it_is_there() -> None:
    found = {row.name: wrong(row) for file in FILES for row in rows(file)}
    assert {name: told for name, told in found.items() if told} == {}


def test_a_mistake_would_be_seen() -> None:
    of = "`tests/test_trl_tests.py::test_a_mistake_would_be_seen`"
    assert [wrong(Row("a::b", "same", "", shown)) for shown in (of, f"{of}, {of}")] == [[], []]
    assert wrong(Row("a::b", "same", "", of.replace("seen", "missed"))) == [of.replace("seen", "missed")[1:-1]]
    assert wrong(Row("a::b", "same", "", f"{of}, PENDING")) == ["PENDING"]
    assert wrong(Row("a::b", "same", "", "`tests/gone.py::test_x`")) == ["tests/gone.py::test_x"]
