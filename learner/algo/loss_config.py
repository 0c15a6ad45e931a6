"""The settings of the loss. What there is to choose from, the tables say. Loads no torch: the driver reads it."""

from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias, cast

from pydantic import Field, field_validator, model_validator

from cluster.config import Frozen, Positive
from learner.algo.advantage import ADVANTAGES, LOSSES
from learner.algo.surrogates import SURROGATES, Bounds

OWN = "path/file.py:function"

if TYPE_CHECKING:
    Kind: TypeAlias = str
    Advantage: TypeAlias = str
else:  # the names of the tables, which a type checker cannot read
    Kind, Advantage = Literal[tuple(LOSSES)], Literal[tuple(ADVANTAGES)]


class LossConfig(Frozen):
    """GRPO variants: docs/losses.md lists them, with equations, papers and the values of null."""

    kind: Kind = "dapo"
    """What the loss is a mean over: `dapo` all tokens, `grpo` the tokens of each completion and then the completions;
    `dr_grpo` divides by a constant. `dapo` for long completions of different lengths."""
    ratio: Annotated[str, Field(examples=[*SURROGATES, OWN])] = "masked"
    """What bounds the ratio of policy to sampler: [losses.md](losses.md) has equations, papers, and how to write one of
    your own. `sequence_mask` is TRL's default; `clip` is PPO's and goes with `updates_per_batch`. The four bounds below
    belong to some of them, and are the paper's values where they are null."""
    epsilon: tuple[Positive, Positive] | None = None
    """The clip range of the ratio, below and above 1."""
    delta: Positive | None = None
    """The most that the ratio of a completion with a negative advantage counts; above the clip range."""
    cap: Annotated[float, Field(ge=1)] | None = None
    """The most that a ratio counts."""
    band: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=1, allow_inf_nan=True)]] | None = None
    """Tokens whose ratio is outside of it are dropped; `.inf` as its upper end drops none above 1."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference. With LoRA that is the model with its adapter switched off, no second model;
    with `learner.mode: full` a second set of weights (`model.reference_dtype`). Raise it to stay close."""
    advantage: Advantage = "batch"
    """A reward less the mean of its group is divided by the standard deviation of the rewards of the group or the
    batch, or not at all (`none`: Dr. GRPO). `group` weighs groups of small differences up."""
    mask_truncated: bool = False
    """DAPO: completions cut at `max_completion_length` count in the advantages, but are not trained on. Set it where
    cut completions score badly only for being cut."""

    top_entropy: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of a batch's tokens that the objective is of: those before which the policy was least certain. The KL
    has all. Below 1 it costs one more forward pass; the paper's 0.2 is for long chains of thought."""

    @property
    def own(self) -> bool:
        """Whether the surrogate is a function of the user's."""
        return self.ratio not in SURROGATES

    @property
    def several_updates(self) -> bool:
        """Whether the surrogate holds a policy near the one that its batch began with."""
        return not self.own and SURROGATES[self.ratio].several_updates

    @property
    def bounds(self) -> Bounds:
        """The settings of the chosen surrogate; of a user's own those that are given, the others are its defaults."""
        papers = Bounds() if self.own else SURROGATES[self.ratio].settings
        names = Bounds.__annotations__ if self.own else papers
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return cast(Bounds, papers | given)

    @field_validator("ratio")
    @classmethod
    def _ratio_is_known(cls, ratio: str) -> str:
        place, _, function = ratio.rpartition(":")
        if ratio in SURROGATES or (place and function.isidentifier()):
            return ratio
        near = get_close_matches(ratio, SURROGATES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"must be one of {', '.join(SURROGATES)}, or a function of your own as {OWN}{hint}")

    @model_validator(mode="after")
    def _bounds_are_used(self) -> "LossConfig":
        bounds = self.bounds
        for name in Bounds.__annotations__:
            value = getattr(self, name)
            if value is not None and name not in bounds:
                users = ", ".join(ratio for ratio, row in SURROGATES.items() if name in row.settings)
                shown = list(value) if isinstance(value, tuple) else value
                raise ValueError(
                    f"{name}: belongs to ratio: {users}, and {self.ratio} has none; leave it out, or set one of them "
                    f"(got {name}={shown})"
                )
        if "delta" in bounds and "epsilon" in bounds and bounds["delta"] <= 1 + bounds["epsilon"][1]:
            raise ValueError(
                f"delta: must be above 1 + epsilon's upper part, {1 + bounds['epsilon'][1]:g}, or it would cut what "
                f"the clip lets through; raise it (got {bounds['delta']:g})"
            )
        return self
