"""TRL's reward functions where they are called with one trajectory at a time."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rewards.loader import load_own
from rollout.env.tools.tool_schema import ToolError


def given(reward: Callable[..., Any], have: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments that there are, those that the function takes: all, where it takes any."""
    parameters = inspect.signature(reward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(have)
    return {name: value for name, value in have.items() if name in parameters}


def check_given(name: str, reward: Callable[..., Any], have: Mapping[str, Any]) -> None:
    """Raises ToolError for a function that asks for what there is not."""
    parameters = inspect.signature(reward).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing := [one for one in needed if one not in have]:
        raise ToolError(
            f"env.args.rewards: {name} asks for {', '.join(missing)}, and there is {', '.join(sorted(have))}; give the "
            "parameter a default"
        )


def load_rewards(uses: Sequence[str], taken: Collection[str] = ()) -> dict[str, Callable[..., Any]]:
    """The functions by the names that their parts of the reward have. taken: the names of other parts.

    Raises rewards.base.RewardLoadError for a name that leads to no function, ToolError for two parts of one name.
    """
    uses = [uses] if isinstance(uses, str) else uses
    functions = [load_own(use, "my_reward") for use in uses]
    found = {str(getattr(one, "__name__", type(one).__name__)): one for one in functions}
    both = [name for name in taken if name in found]
    if len(found) < len(functions) or both:
        raise ToolError(
            f"env.args.rewards: each part of the reward must have a name of its own, got {', '.join(uses)}"
            f"{f' beside {both[0]}' if both else ''}; rename a function"
        )
    return found
