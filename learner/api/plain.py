"""Python values -> what a configuration file or a row of JSON lines holds."""

import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from learner.api.errors import InputError

BOOLEANS = ("bool", "bool_")  # how numpy calls its own, from 2 on and before

Other = Callable[[Any, str], Any]  # (what no file holds, where it stands) -> what stands for it, or an exception


def plain(value: Any, where: str, other: Other) -> Any:
    """The value with numbers of numpy as Python's, paths as text, tuples as lists; `other` is asked about the rest."""
    if value is None:
        return value
    if is_bool(value):
        return bool(value)
    if isinstance(value, str):
        return str.__str__(value)  # of an Enum that is text its value, not its name
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise InputError(f"{where}: keys must be text, got {wrong[0]!r}; write {str(wrong[0])!r}")
        return {str(key): plain(part, f"{where}.{key}", other) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part, f"{where}.{index}", other) for index, part in enumerate(value)]
    return other(value, where)


def is_bool(value: Any) -> bool:
    """Also for numpy's, which is no bool, nor the same as True or False."""
    return isinstance(value, bool) or type(value).__name__ in BOOLEANS
