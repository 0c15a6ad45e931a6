"""The configuration of a run as one level: what trackers, reports and cards show of it."""

from collections.abc import Mapping
from typing import Any


def dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with dots between their parts -> values, in the order of the tree. An empty mapping is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = dotted(value) if isinstance(value, Mapping) else {}
        flat |= {f"{key}.{name}": part for name, part in inner.items()} or {key: value}
    return flat
