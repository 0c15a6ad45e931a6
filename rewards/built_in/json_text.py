"""The JSON value in a completion, read as the standard says it."""

import json
import math
import re
from typing import Any, NoReturn

from rewards.base import tagged

_FENCED = re.compile(r"```[ \t]*(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL | re.IGNORECASE)


def json_of(text: str, tag: str | None = None) -> Any:
    """The value that `text` is, white space and a fence of three backquotes aside, or what stands in its last
    `<tag>...</tag>`. Raises ValueError: anything else stands there, a key comes twice, or it is nested too deep to
    read."""
    inside = text.strip() if tag is None else tagged(text, tag)
    if inside is None:
        raise ValueError("there is no such tag")
    fenced = _FENCED.fullmatch(inside)
    try:
        return json.loads(fenced[1] if fenced else inside, parse_constant=_refuse, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is no JSON value") from error


def without_nulls(value: Any) -> Any:
    """The value without the keys whose value is null: Arrow and Parquet give every row the keys of all rows."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def as_json(value: Any, at: str = "") -> Any:
    """The value made of JSON's types, which numpy's and torch's numbers and lists, and tuples, become. `at`: the key at
    which it stands, for the sentence. Raises ValueError: it holds what is none of them."""
    moment = getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m")  # of which tolist may make an int
    if hasattr(value, "tolist") and not moment:
        value = value.tolist()
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise ValueError(
                f"the key {odd[0]!r}{at and f' under {at!r}'} is of type {type(odd[0]).__name__}, not text"
            )
        return {key: as_json(inner, f"{at}.{key}" if at else key) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner, f"{at}[{i}]") for i, inner in enumerate(value)]
    finite = not isinstance(value, float) or math.isfinite(value)
    if value is None or (isinstance(value, str | int | float) and finite):
        return value
    kind = type(value).__name__ if finite else repr(value)
    raise ValueError(f"{kind}{at and f' at {at!r}'} is nothing that JSON has")


def gold_json(text: str) -> Any:
    """The value that a text of the data is. Raises ValueError."""
    return json.loads(text, parse_constant=_refuse)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found
