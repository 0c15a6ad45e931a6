"""What the user writes about a reward. Light: needs pydantic and nothing else."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from rewards.secret_values import Arguments

TAKEN = frozenset({"mean", "std", "failed", "ms", "zero_variance_groups"})  # what metrics are called beside rewards


class RewardConfig(BaseModel):
    """One reward function of the `rewards` list.

    Raises pydantic.ValidationError on an unknown key or a value out of its range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    use: Annotated[str, Field(min_length=1)]
    """The function: a built-in name, `package.module:function`, or `path/file.py:function` (relative to the working
    directory)."""
    weight: FiniteFloat = 1.0
    """Factor of this reward function in the weighted sum; may be negative. Raise it for what matters most."""
    timeout_s: Annotated[FiniteFloat, Field(gt=0)] = 10.0
    """Seconds for one call, which scores one group. Loading the reward function is not charged. Raise it for slow
    functions, such as a model behind an API."""
    on_error: Literal["fail", "skip"] = "skip"
    """`skip`: a completion that the function fails on gets no reward, and a status that says why. `fail`: the run
    stops; for a function that must never fail."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] | None = None
    """Name in the metrics; null: the built-in's or the function's name."""
    args: Arguments = {}
    """Keyword arguments given to the function on every call. `env:NAME` is the value of an environment variable."""
    env: tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()
    """Environment variables that the function may see, such as OPENAI_API_KEY; others that may hold a secret are kept
    from it (rewards/environment.py lists those that are not)."""


def resolved_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """The metrics name of each reward, in order and unique: a second `accuracy` becomes `accuracy_2`."""
    names: list[str] = []
    for reward in rewards:
        wanted = reward.name or reward.use.rsplit(":", 1)[-1]
        name, count = wanted, 1
        while name in names:
            count += 1
            name = f"{wanted}_{count}"
        names.append(name)
    return names
