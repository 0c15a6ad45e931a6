"""What the user writes about a reward. Light: needs pydantic and nothing else."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, PlainSerializer, model_validator

from cluster.errors import WrongInput
from rewards.base import ADAPTER

# Secrets among the arguments of a data source or a reward: used, never shown or stored.
#
# A configuration had better hold `env:NAME`, which is stored as it stands and looked up where it is used. What is given
# in full (`token: hf_...`) is MASK in config.yaml, checkpoints, --dry-run and messages.

MASK = "***"
_REFERENCE = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)")
# The last word of a key, or its last two.
_SECRET_KEY = re.compile(
    r"(?:^|[_-])(?:password|passwd|secret|credentials?|authorization|(?:api|access|secret|private|account)[_-]?key"
    r"|token)$",
    re.IGNORECASE,
)
# A token of a text, which is no secret.
_TEXT_KEY = re.compile(
    r"(?:^|[_-])(?:pad|eos|bos|unk|cls|sep|mask|end|start|begin|stop|think(?:ing)?|answer|special|max_new|per)[_-]token$",
    re.IGNORECASE,
)
_MASKED = re.compile(r"\*{3}|(?:bearer|basic|token) \*{3}|.*://\*{3}@.*", re.IGNORECASE | re.DOTALL)
_SECRET_MAPPING = ("storage_options", "headers")  # all that stands in them
_SECRET_TEXT = re.compile(
    r"(?:(?<![A-Za-z])|(?<=\\[nrt]))sk-[A-Za-z0-9_-]{16,}"
    r"|hf_[A-Za-z0-9]{16,}|gh[opsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16}"
    r"|xox[abp]-[A-Za-z0-9-]{10,}|eyJ[\w-]{10,}\.[\w-]+\.[\w-]*|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
)


def masked(args: Any) -> Any:
    """The arguments as they may be shown."""
    return _mapped(args, lambda value, secret: _hidden(value) if secret else scrubbed(value), False)


def scrubbed(value: Any, args: Any = None) -> Any:
    """Text without what looks like a secret, and without the secrets of `args`; what is no text as it is."""
    if not isinstance(value, str):
        return value
    for secret in sorted(set(_secrets(args)), key=len, reverse=True):
        value = value.replace(secret, MASK)
    return _SECRET_TEXT.sub(MASK, value)


def resolved(args: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The arguments with each `env:NAME` replaced by the variable. `key`: what messages call them.

    Raises WrongInput where the variable is not set, or a mask stands in the secret's place.
    """

    def value_of(value: Any, secret: bool) -> Any:
        if isinstance(value, str) and _MASKED.fullmatch(value):
            raise WrongInput(
                f"{key}: {MASK} is what stored configurations show in place of a secret; give it again, best by the "
                "name of an environment variable, env:NAME"
            )
        reference = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if reference is None:
            return value
        if reference[1] not in os.environ:
            raise WrongInput(f"{key}: {value} names an environment variable that is not set; export {reference[1]}")
        return os.environ[reference[1]]

    found: dict[str, Any] = _mapped(args, value_of, False)
    return found


def _hidden(value: Any) -> Any:
    if value is None or isinstance(value, bool):  # token: true is datasets' "the one that is logged in"
        return value
    return value if isinstance(value, str) and _REFERENCE.fullmatch(value) else MASK


def _secrets(args: Any) -> Iterator[str]:
    """The texts that `masked` would hide, but for those of one or two letters, which occur in every word."""
    found: list[str] = []

    def note(value: Any, secret: bool) -> None:
        if secret and _hidden(value) == MASK and len(str(value)) > 2:
            found.append(str(value))

    _mapped(args, note, False)
    return iter(found)


def _mapped(value: Any, change: Any, secret: bool) -> Any:
    """A copy with `change(leaf, whether a key above says that it is secret)` in place of each leaf."""
    if isinstance(value, Mapping):
        return {key: _mapped(item, change, secret or _is_secret(str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change, secret) for item in value]
    return change(value, secret)


def _is_secret(key: str) -> bool:
    return key in _SECRET_MAPPING or bool(_SECRET_KEY.search(key) and not _TEXT_KEY.search(key))


Arguments = Annotated[dict[str, Any], PlainSerializer(masked, return_type=dict[str, Any]), Field(repr=False)]


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
    the learner scores; only `weight`, `watch` and `name` go with it."""
    weight: Number = 1.0
    """Factor of this reward function in the weighted sum; may be negative. Raise it for what matters most."""
    watch: bool = False
    """Score and record, and never train on it: a check against reward hacking (docs/rewards.md). Its failures cost no
    completion and end no run, so `weight` and `on_error` do not go with it."""
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
    from it (rewards/limits.py lists those that are not)."""

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        """`number` is short for `{use: number}`."""
        return {"use": given} if isinstance(given, str) else given

    @property
    def adapter(self) -> str | None:
        """The folder of a reward model; None for a function."""
        return self.use.removeprefix(ADAPTER) if self.use.startswith(ADAPTER) else None

    @property
    def share(self) -> float | None:
        """Its factor in the weighted sum; None for a watch, which has no part in it."""
        return None if self.watch else self.weight

    @model_validator(mode="after")
    def _watch_weighs_nothing(self) -> "RewardConfig":
        fields = type(self).model_fields  # by value: a configuration that was written out sets them all
        given = [key for key in ("weight", "on_error") if getattr(self, key) != fields[key].default]
        if self.watch and given:
            raise ValueError(
                f"watch: true does not go with {', '.join(given)}: a watch is never trained on, costs no completion "
                "and ends no run; leave that out"
            )
        return self

    @model_validator(mode="after")
    def _adapter_alone(self) -> "RewardConfig":
        free = {"use", "weight", "watch", "name"}
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


def trained_on(rewards: Sequence[RewardConfig]) -> tuple[RewardConfig, ...]:
    """Those whose weighted sum is trained on, each with its metrics name; the others are watches."""
    return tuple(reward for reward in _named(rewards) if not reward.watch)


def watches_of(rewards: Sequence[RewardConfig]) -> tuple[str, ...]:
    """Metrics names of those that are never trained on."""
    return tuple(str(reward.name) for reward in _named(rewards) if reward.watch)


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
