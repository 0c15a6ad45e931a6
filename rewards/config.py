"""What the user writes about a reward. Light: needs pydantic and nothing else."""

from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from rewards.base import ADAPTER
from rewards.secret_values import Arguments

ENV_COUNTS = frozenset({"turns", "turns_max", "calls", "malformed", "seconds", "observation_tokens", "errors"})
"""What the driver counts of trajectories, as env/<name> and eval/<name>; besides these outcome_<...>."""
TAKEN = ENV_COUNTS | {"mean", "std", "failed", "ms", "zero_variance_groups", "unscored", "zeroed"}
"""What reward/<name> and eval/<name> are called beside rewards."""


def _no_truth(value: Any) -> Any:
    if isinstance(value, bool):  # to Python true is 1
        raise ValueError("must be a number")
    return value


Number = Annotated[FiniteFloat, BeforeValidator(_no_truth)]


class RewardConfig(BaseModel):
    """One reward function of the `rewards` list, or a reward model.

    Raises pydantic.ValidationError on an unknown key or a value out of its range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    use: Annotated[str, Field(min_length=1)]
    """The function: a built-in name, `package.module:function`, or `path/file.py:function` (relative to the working
    directory). Or `adapter:<folder>`: a reward model, as an adapter with a scalar head on the base of the policy, which
    the learner scores; only `weight` and `name` go with it."""
    weight: Number = 1.0
    """Factor of this reward function in the weighted sum; may be negative. Raise it for what matters most."""
    timeout_s: Annotated[Number, Field(gt=0)] = 10.0
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

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        """`number` is short for `{use: number}`."""
        return {"use": given} if isinstance(given, str) else given

    @property
    def adapter(self) -> str | None:
        """The folder of a reward model; None for a function."""
        return self.use.removeprefix(ADAPTER) if self.use.startswith(ADAPTER) else None

    @model_validator(mode="after")
    def _adapter_alone(self) -> "RewardConfig":
        free = {"use", "weight", "name"}
        fields = type(self).model_fields.items()  # by value: a configuration that was written out sets them all
        given = [key for key, field in fields if key not in free and getattr(self, key) != field.default]
        if self.adapter is not None and given:
            raise ValueError(
                f"use: {ADAPTER}<folder> does not go with {', '.join(sorted(given))}: no function is called, the "
                "learner scores it; leave that out"
            )
        if self.adapter is not None and not PurePath(self.adapter).name:
            raise ValueError(
                f"use: {ADAPTER}<folder> must end in the name of a folder, got {self.use!r}; give its path"
            )
        return self


def functions_of(rewards: Sequence[RewardConfig]) -> tuple[RewardConfig, ...]:
    """Those that are functions, which rollout workers call, each with its metrics name."""
    return tuple(reward for reward in _named(rewards) if reward.adapter is None)


def adapters_of(rewards: Sequence[RewardConfig]) -> tuple[RewardConfig, ...]:
    """Those that are reward models on the policy's base, which the learner scores, each with its metrics name."""
    return tuple(reward for reward in _named(rewards) if reward.adapter is not None)


def classifier_of(reward: RewardConfig) -> str | None:
    """The model of a sequence_classifier, which each reward process loads; None for everything else."""
    model = reward.args.get("model") if reward.use == "sequence_classifier" else None
    return model if isinstance(model, str) else None


def _named(rewards: Sequence[RewardConfig]) -> list[RewardConfig]:
    names = resolved_names(rewards)
    return [one.model_copy(update={"name": name}) for one, name in zip(rewards, names, strict=True)]


def resolved_names(rewards: Sequence[RewardConfig]) -> list[str]:
    """The metrics name of each reward, in order and unique: a second `accuracy` becomes `accuracy_2`."""
    names: list[str] = []
    for reward in rewards:
        wanted = reward.name or PurePath(reward.use.rsplit(":", 1)[-1]).name
        name, count = wanted, 1
        while name in names:
            count += 1
            name = f"{wanted}_{count}"
        names.append(name)
    return names
