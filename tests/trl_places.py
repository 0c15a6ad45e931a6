"""The tables of docs/trl.md as learner/driver/trl_places.json, which the errors quote: python -m tests.trl_places."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, FILE = ROOT / "docs" / "trl.md", ROOT / "learner" / "driver" / "trl_places.json"
ROW = re.compile(r"^\| (`.*?) \| (.*) \|$", re.MULTILINE)
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def rows(text: str) -> list[tuple[list[str], str]]:
    """The arguments of each row of its tables, and what is said of them."""
    return [(re.findall(r"`(\w+)`", names), told) for names, told in ROW.findall(text)]


def places() -> dict[str, str]:
    """Argument of TRL -> its place here, as plain text."""
    text = PAGE.read_text()
    return {name: LINK.sub(r"docs/\1", told).replace("`", "") for names, told in rows(text) for name in names}


if __name__ == "__main__":
    FILE.write_text(json.dumps(places(), indent=1, sort_keys=True) + "\n")
