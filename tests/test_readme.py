"""What the README says of the repository itself, counted."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_the_reading_order_is_as_long_as_it_says() -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(r"About ([\d,]+) lines hold the whole idea, in this order: (.*?)\.\n\n", text, re.DOTALL)
    assert found is not None
    files, folder = [], ""
    for name in re.findall(r"`([\w/]+\.py)`", found[2]):
        folder = name.rpartition("/")[0] or folder  # of a name without one: that of the file before it
        files.append(ROOT / (name if "/" in name else f"{folder}/{name}"))
    lines = sum(len(file.read_text().splitlines()) for file in files)
    assert len(files) >= 9
    assert lines == pytest.approx(int(found[1].replace(",", "")), rel=0.05), f"{lines} lines in {len(files)} files"
