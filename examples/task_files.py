"""The files of a task that an example makes: train.jsonl and held_out.jsonl, a problem a line."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def contents(rows: Mapping[str, list[Any]], rng: random.Random) -> dict[str, str]:
    """The content of each file, by name. rows: of each file; they are shuffled in place, by `rng`."""
    for each in rows.values():
        rng.shuffle(each)
    return {name: "".join(json.dumps(row) + "\n" for row in each) for name, each in rows.items()}


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        (folder / name).write_text(content)
