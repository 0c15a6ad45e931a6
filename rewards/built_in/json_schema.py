"""Is the completion JSON that keeps to a schema?"""

import importlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from rewards.base import Zeroed, check_tag, column_of, text_of
from rewards.built_in.json_text import (
    as_json,
    gold_json,
    json_of,
)
from rewards.limits import Late, Patience

# Imported with this module, which only the loader imports: what that takes must not count against the deadline.
_jsonschema = importlib.import_module("jsonschema")
_SECONDS = 1.0  # for one completion
VALUES = ("const", "default", "enum", "examples")  # keys of what stands for values, and of schemas by names
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
# By name, since what the library checks of the others depends on which other packages are there.
_FORMATS = _jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "regex", "uuid"))
_KNOWN = importlib.import_module("jsonschema_specifications").REGISTRY


def json_schema(
    completions: Sequence[Any], *, column: str = "schema", tag: str | None = None, **columns: Sequence[Any]
) -> list[float]:
    """1.0 if the completion is JSON, and nothing else, that its problem's JSON schema allows, else 0.0.

    The schema comes from `column`: a mapping, of which keys whose value is null are left out (`const: null` too), or
    its text. The JSON is the whole text, a fence of three backquotes aside, or with `tag` what stands in the last
    `<tag>...</tag>`. References to other documents are not followed. `format` is checked where it is
    date, email, ipv4, ipv6, regex or uuid. A completion that takes longer than a second scores 0.0, such as one on
    which a pattern of the schema backtracks for ever.
    Raises ValueError if the column is missing, or a schema is none.
    """
    if tag is not None:
        check_tag(tag)
    scores: list[float] = []
    why: dict[int, str] = {}
    patience = Patience(_SECONDS)
    for completion, schema in zip(completions, column_of(columns, column), strict=True):
        validator = _validator(schema if isinstance(schema, str) else _text(schema))
        score = 0.0
        try:
            with patience.with_one():
                score = float(_fits(validator, text_of(completion), tag))
        except (RecursionError, OverflowError):  # of what was written: too deep, or a number beyond all others
            pass
        except Late:
            why[len(scores)] = f"not held against its schema within {_SECONDS:g} s: a pattern in it may backtrack"
        scores.append(score)
    return Zeroed(scores, why)


def _fits(validator: Any, text: str, tag: str | None) -> bool:
    try:
        found = json_of(text, tag)
    except ValueError:
        return False
    return bool(validator.is_valid(found))


def _text(schema: Any) -> str:
    try:
        return json.dumps(_told(as_json(schema)))
    except ValueError as error:
        raise _no_schema(str(schema)[:80], error) from None


def _no_schema(shown: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:200]
    return ValueError(f"args.column: {shown} is no JSON schema ({reason}); leave such problems out")


def _told(schema: Any, names: bool = False) -> Any:
    """The schema without the keys that a row has because others do; what stands for values is left as it is. `names`:
    its keys are names that the schema's author gave, and no words of JSON schema."""
    if isinstance(schema, dict):
        found = {key: inner for key, inner in schema.items() if inner is not None}
        if names:
            return {name: _told(inner) for name, inner in found.items()}
        return {key: inner if key in VALUES else _told(inner, key in NAMED) for key, inner in found.items()}
    return [*map(_told, schema)] if isinstance(schema, list) else schema


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    try:
        schema = gold_json(text)
        if not isinstance(schema, dict | bool):
            raise ValueError("it must be a mapping, true or false")
        kind = _jsonschema.validators.validator_for(schema, default=_jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        _check_references(schema, kind)
    except (ValueError, _jsonschema.SchemaError, Unresolvable) as error:
        raise _no_schema(repr(text[:80]), error) from None
    return kind(schema, registry=_KNOWN, format_checker=_FORMATS)


def _check_references(schema: Any, kind: Any) -> None:
    """Follows each, those too that only some completions would lead to. Raises Unresolvable."""
    root = specification_with(kind.ID_OF(kind.META_SCHEMA)).create_resource(schema)
    waiting = [(root, _KNOWN.resolver_with_root(root))]
    while waiting:
        one, resolver = waiting.pop()
        if isinstance(one.contents, dict):
            for key in ("$ref", "$dynamicRef"):
                if key in one.contents:
                    resolver.lookup(one.contents[key])
        waiting += [(part, resolver.in_subresource(part)) for part in one.subresources()]
