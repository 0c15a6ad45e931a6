"""How much of the gold JSON does the completion say?"""

from collections.abc import Iterator, Sequence
from typing import Any

from rewards.base import check_tag, column_of, text_of
from rewards.built_in.json_text import (
    as_json,
    gold_json,
    json_of,
    without_nulls,
)

Path = tuple[str | int, ...]


def json_match(
    completions: Sequence[Any], *, column: str = "answer", tag: str | None = None, **columns: Sequence[Any]
) -> list[float]:
    """The share of values that the completion's JSON and the gold JSON have in common, 1.0 if they are equal.

    Values are compared where they stand, under the same keys and at the same places of lists; those that only one of
    the two has count against it. A key whose value is null is as one that is not there. Text that is no JSON scores
    0.0. Gold comes from `column`: a value, or the text of
    one. Where the JSON is: see json_schema. Raises ValueError if the column is missing, or a gold answer is no JSON.
    """
    if tag is not None:
        check_tag(tag)
    scores = []
    for completion, gold in zip(completions, column_of(columns, column), strict=True):
        right = without_nulls(_gold(gold))
        text = text_of(completion)
        try:
            found = json_of(text, tag)
        except ValueError:
            scores.append(0.0)
            continue
        try:
            scores.append(_common(without_nulls(found), right))
        except RecursionError:
            scores.append(0.0)
    return scores


def _gold(gold: Any) -> Any:
    if gold is None:
        raise ValueError("args.column: the gold answer must be JSON, and is null; leave such problems out")
    try:
        return gold_json(gold) if isinstance(gold, str) else as_json(gold)
    except ValueError as error:
        shown = repr(gold[:80]) if isinstance(gold, str) else str(gold)[:80]
        raise ValueError(
            f"args.column: the gold answer must be JSON, got {shown} ({error}); leave such problems out"
        ) from None


def _common(one: Any, other: Any) -> float:
    a, b = dict(_leaves(one)), dict(_leaves(other))
    alike = sum(path in b and _same(value, b[path]) for path, value in a.items())
    return alike / len(a.keys() | b.keys())


def _leaves(value: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Each value that holds no others, an empty list or mapping being one, with where it stands."""
    if isinstance(value, dict | list) and value:
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*at, key))
    else:
        yield at, value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):  # 1 is not true
        return one is other
    return bool(one == other)
