"""TRL's reward functions where they are called with one trajectory at a time."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def given(reward: Callable[..., Any], have: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments that there are, those that the function takes: all, where it takes any."""
    parameters = inspect.signature(reward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(have)
    return {name: value for name, value in have.items() if name in parameters}
