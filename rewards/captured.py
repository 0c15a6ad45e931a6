"""What a function brings along: the variables around it and its defaults; of other things, what they are made of."""

import dis
import functools
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any


def captured(function: FunctionType) -> dict[str, Any]:
    """Name -> value of the variables that a function reads from around itself, and of its parameters' defaults.

    A variable that is not set (yet) is left out: calling the function would be its NameError.
    """
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # an empty cell
            continue
    names = sorted(set(_globals(function.__code__)))
    found |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    found |= dict(zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True))
    return found | (function.__kwdefaults__ or {})


def _globals(code: CodeType) -> Iterator[str]:
    """Names that the code looks up outside of itself, that of functions inside included."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals(constant)


def parts(value: Any) -> Iterator[tuple[str, Any]]:
    """(name, part) of what a value is made of, as its author would name it; nothing for what has no parts."""
    if isinstance(value, FunctionType):
        yield from captured(value).items()
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), *((f"args[{i}]", one) for i, one in enumerate(value.args)))
        yield from value.keywords.items()
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif inspect.isclass(value) or hasattr(value, "__dict__"):
        yield from vars(value).items()
