"""The tables of docs/trl.md as JSON files, which the errors quote: python -m tests.trl_places.

TRL's arguments are in learner/config/trl_places.json, PEFT's and other programs' in learner/config/other_names.json.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, FILE = ROOT / "docs" / "trl.md", ROOT / "learner" / "config" / "trl_places.json"
OTHERS = ROOT / "learner" / "config" / "other_names.json"
SECTIONS = ("GRPOTrainer", "GRPOConfig", "What GRPOConfig inherits")  # of TRL's arguments
PEFT, OTHER_PROGRAMS = "PEFT's LoraConfig", "Names in other programs"
ROW = re.compile(r"^\| (`.*?) \| (.*) \|$", re.MULTILINE)
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")


def rows(text: str) -> list[tuple[list[str], str]]:
    """The arguments of each row of its tables, and what is said of them."""
    return [(re.findall(r"`(\w+)`", names), told) for names, told in ROW.findall(text)]


def section(begin: str) -> str:
    """The text of the one section whose heading begins so."""
    (text,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith(begin)]
    return text


def places(*sections: str) -> dict[str, str]:
    """Name -> its place here, as plain text, of the tables of these sections."""
    told = [row for begin in sections for row in rows(section(begin))]
    return {name: LINK.sub(r"docs/\1", text).replace("`", "") for names, text in told for name in names}


def written(content: object) -> str:
    """The text of a file."""
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def files() -> dict[Path, str]:
    """Both files, as the page has them."""
    others = {"peft": places(PEFT), "others": places(OTHER_PROGRAMS)}
    return {FILE: written(places(*SECTIONS)), OTHERS: written(others)}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
