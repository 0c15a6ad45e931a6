"""Is the completion JSON that keeps to a schema?"""

import importlib
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from referencing.exceptions import Unresolvable
from referencing.jsonschema import specification_with

from rewards.json_text import NoJson, json_of
from rewards.text import check_tag, column_of, text_of

# Imported with this module, which only the loader imports: what that takes must not count against the deadline.
_jsonschema = importlib.import_module("jsonschema")
VALUES = ("const", "default", "enum", "examples")
_KNOWN = importlib.import_module("jsonschema_specifications").REGISTRY


def json_schema(
    completions: Sequence[Any], *, column: str = "schema", tag: str | None = None, **columns: Sequence[Any]
) -> list[float]:
    """1.0 if the completion is JSON, and nothing else, that its problem's JSON schema allows, else 0.0.

    The schema comes from `column`: a mapping, of which keys whose value is null are left out (`const: null` too), or
    its text. The JSON is the whole text, a fence of three backquotes aside, or with `tag` what stands in the last
    `<tag>...</tag>`. References to other documents are not followed.
    Raises ValueError if the column is missing, or a schema is none.
    """
    if tag is not None:
        check_tag(tag)
    scores = []
    for completion, schema in zip(completions, column_of(columns, column), strict=True):
        validator = _validator(schema if isinstance(schema, str) else json.dumps(_told(schema)))
        try:
            scores.append(float(validator.is_valid(json_of(text_of(completion), tag))))
        except (NoJson, RecursionError, OverflowError):  # of what was written: too deep, or a number beyond all others
            scores.append(0.0)
    return scores


def _told(schema: Any) -> Any:
    """The schema without the keys that a row has because others do; what stands for values is left as it is."""
    if isinstance(schema, dict):
        found = {key: inner for key, inner in schema.items() if inner is not None}
        return {key: inner if key in VALUES else _told(inner) for key, inner in found.items()}
    return [*map(_told, schema)] if isinstance(schema, list) else schema


@lru_cache(maxsize=256)
def _validator(text: str) -> Any:
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict | bool):
            raise ValueError("it must be a mapping, true or false")
        kind = _jsonschema.validators.validator_for(schema, default=_jsonschema.Draft202012Validator)
        kind.check_schema(schema)
        _check_references(schema, kind)
    except (ValueError, _jsonschema.SchemaError, Unresolvable) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"args.column: {text[:80]!r} is no JSON schema ({reason}); leave such problems out") from None
    return kind(schema, registry=_KNOWN)


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
