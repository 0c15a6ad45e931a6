"""What the chat template is told of a Python function, and the check of the arguments that a policy gives it."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from rewards.base import said
from rollout.env.protocol import ToolSpec

_LEFT_OUT = ("title", "default", "discriminator")  # of pydantic's; transformers has none of them either


class ToolError(ValueError):
    """A function that cannot be a tool; the message says what it lacks."""


def named(function: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """The name of a tool, and the function as its schema shows it: of a functools.partial without what it gives itself,
    of an object its __call__. Raises ToolError for a generator."""
    inner = function.func if isinstance(function, partial) else function
    code: Callable[..., Any] = inner if hasattr(inner, "__name__") else type(inner).__call__.__get__(inner)
    name = str(getattr(function, "__name__", getattr(inner, "__name__", type(inner).__name__)))
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise ToolError(f"tool {name}: must return its answer, and yields; return a value, for example a list")
    if code is function:
        return name, function

    def shown() -> None: ...

    given = function.keywords if isinstance(function, partial) else {}
    signature = inspect.signature(partial(inner, *function.args) if isinstance(function, partial) else code)
    asked = {key: parameter for key, parameter in signature.parameters.items() if key not in given}
    hints = _hints(code, name)
    shown.__name__, shown.__doc__ = name, inspect.getdoc(code)
    shown.__annotations__ = {key: hints[key] for key in asked if key in hints}
    shown.__signature__ = signature.replace(parameters=[*asked.values()])  # type: ignore[attr-defined]
    return name, shown


def spec_of(function: Callable[..., Any], name: str, arguments: type[BaseModel]) -> ToolSpec:
    """Its schema as transformers makes it, as in TRL; with pydantic's, which `arguments` has, where transformers knows
    no more of a type than that it is an object: an enum is none, and a model has fields. Raises ToolError."""
    from transformers.utils.chat_template_utils import get_json_schema  # which loads torch

    try:
        spec: ToolSpec = get_json_schema(function)
    except Exception as error:  # of a function that nothing is known of
        raise ToolError(
            f"tool {name}: every parameter must have an annotation, and in the docstring, below a line `Args:`, a line "
            "`name: what it is` without its type, so that the model can be told how to call it; "
            f"{said(error).rstrip('.!')}"
        ) from error
    spec["function"].pop("return", None)  # no chat template reads it
    properties = spec["function"]["parameters"]["properties"]
    if vague := [key for key, schema in properties.items() if _is_vague(schema)]:
        try:
            whole = arguments.model_json_schema()
            for key in vague:
                told = _inlined(whole["properties"][key], whole.get("$defs", {}))
                properties[key] = told | {"description": properties[key]["description"]}
        except Exception as error:  # pydantic's own are of several kinds
            raise ToolError(f"tool {name}: annotations must be types that JSON has: {said(error)[:200]}") from error
    return spec


def arguments_of(function: Callable[..., Any], name: str) -> type[BaseModel]:
    """A model of the keyword arguments. Its fields have made-up names, since a parameter may be called as a method.
    Raises ToolError."""
    hints = _hints(function, name)
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolError(f"tool {name}: parameters must be given by name, got {parameter}; name each")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"argument_{index}"] = (hints.get(parameter.name, Any), Field(default, alias=parameter.name))
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except Exception as error:  # pydantic's own are of several kinds
        raise ToolError(f"tool {name}: annotations must be types that JSON can hold: {said(error)[:200]}") from error


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:  # evaluating them runs code
        raise ToolError(f"tool {name}: annotations must be names of types that are there: {said(error)}") from error


def _is_vague(schema: Any) -> bool:
    """Whether it, or a part of it, is an object of which nothing is known."""
    if isinstance(schema, list):
        return any(map(_is_vague, schema))
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type", ())
    here = (kinds == "object" or "object" in kinds) and "additionalProperties" not in schema
    return here or any(map(_is_vague, schema.values()))


def _inlined(schema: Mapping[str, Any], named: Mapping[str, Any], within: tuple[str, ...] = ()) -> dict[str, Any]:
    """A schema of pydantic's without references, which chat templates do not follow, and as transformers writes it."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in within:
            raise ToolError(f"{name} holds itself, and a tool's schema must come to an end")
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inlined({**named[name], **rest}, named, (*within, name))
    told: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            told[key] = {name: _inlined(one, named, within) for name, one in value.items()}
        elif isinstance(value, Mapping) and key not in _LEFT_OUT:
            told[key] = _inlined(value, named, within)
        elif isinstance(value, list):
            told[key] = [_inlined(one, named, within) if isinstance(one, Mapping) else one for one in value]
        elif key not in _LEFT_OUT and (key, value) != ("additionalProperties", True):
            told[key] = value
    others = [one for one in told.get("anyOf", ()) if one != {"type": "null"}]
    if "anyOf" in told and len(others) == 1:
        del told["anyOf"]
        return {**others[0], **told, "nullable": True}
    return told
