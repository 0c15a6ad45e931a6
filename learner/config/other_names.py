"""What docs/trl.md says of PEFT's fields and of names in other programs, for the errors that meet them."""

import json
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")  # made from the page by tests/trl_places.py
NOT_HERE = "not here: "


@cache
def _places() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def of_peft(field: str) -> str | None:
    """Where a field of PEFT's LoraConfig has its place, or `not here: ` and why; None for any other word."""
    return _places()["peft"].get(field)


def why_not(field: str) -> str | None:
    """Why there is nothing for a field of PEFT's LoraConfig; None for one that has a place, and any other word."""
    place = of_peft(field) or ""
    return place.removeprefix(NOT_HERE) if place.startswith(NOT_HERE) else None


def of_others(name: str) -> str | None:
    """Where a setting has its place that other programs call so; None for any other word."""
    return _places()["others"].get(name)
