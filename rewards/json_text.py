"""The JSON value in a completion, read as the standard says it."""

import json
import re
from typing import Any, NoReturn

from rewards.text import tagged

_FENCED = re.compile(r"```[ \t]*(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL | re.IGNORECASE)


class NoJson(ValueError):
    """The text is no JSON value."""


def json_of(text: str, tag: str | None = None) -> Any:
    """The value that `text` is, white space and a fence of three backquotes aside, or what stands in its last
    `<tag>...</tag>`. Raises NoJson: anything else stands there, a key comes twice, or it is nested too deep to read."""
    inside = text.strip() if tag is None else tagged(text, tag)
    if inside is None:
        raise NoJson
    fenced = _FENCED.fullmatch(inside)
    try:
        return json.loads(fenced[1] if fenced else inside, parse_constant=_refuse, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise NoJson from error


def without_nulls(value: Any) -> Any:
    """The value without the keys whose value is null: Arrow and Parquet give every row the keys of all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found
