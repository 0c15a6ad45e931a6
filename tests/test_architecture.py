"""docs/architecture.md: the reading order is as long as it says, and the walk of a prompt is the code's."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text()
BORDERS = ["rollout/service.py", "learner/trainer/service.py"]  # protocols, which both ends of a process border know
WALK = re.findall(r"^\d+\. `([\w/]+\.py)`", TEXT, re.MULTILINE)


def test_the_reading_order_is_as_long_as_it_says() -> None:
    found = re.search(r"About ([\d,]+) lines hold the whole idea, in this order: (.*?)\.\n\n", TEXT, re.DOTALL)
    assert found is not None
    files = [ROOT / name for name in re.findall(r"`([\w/]+\.py)`", found[2])]
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert len(files) >= 9
    assert lines == pytest.approx(int(found[1].replace(",", "")), rel=0.05), f"{lines} lines in {len(files)} files"


def test_a_prompt_walks_through_few_files() -> None:
    assert 15 < len(WALK) <= 21
    assert len(set(WALK)) == len(WALK)
    assert [name for name in WALK if not (ROOT / name).is_file()] == []


def knows(one: str, other: str) -> bool:
    """Whether a file imports or mentions another."""
    text = (ROOT / one).read_text()
    package, _, module = other.removesuffix(".py").replace("/", ".").rpartition(".")
    return f"{package}.{module}" in text or re.search(rf"from {package} import .*\b{module}\b", text) is not None


def test_each_file_of_the_walk_is_known_to_one_before_it_or_knows_one() -> None:
    strangers = [
        name
        for index, name in enumerate(WALK[1:], start=1)
        if not any(knows(before, name) or knows(name, before) for before in [*BORDERS, *WALK[:index]])
    ]
    assert strangers == []


def test_what_was_moved_is_where_the_table_says() -> None:
    rows = (ROOT / "docs" / "moved_files.csv").read_text().splitlines()[1:]
    moved = [row.split(",", 1) for row in rows]
    assert len(moved) > 350
    assert [now for _, now in moved if not now.startswith(("deleted", '"deleted')) and not (ROOT / now).is_file()] == []
