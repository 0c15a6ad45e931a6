"""What docs/trl.md says of an argument of TRL's, for the error that meets it."""

import json
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")  # made from the page by tests/trl_places.py


def place_of(argument: str) -> str | None:
    """Where an argument of GRPOTrainer or GRPOConfig has its place here; None for any other word."""
    places: dict[str, str] = json.loads(FILE.read_text(encoding="utf-8"))
    return places.get(argument)
