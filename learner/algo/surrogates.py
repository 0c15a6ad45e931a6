"""The surrogate objectives that learner.loss.ratio names, which bound the importance ratio of a token in different
ways; and LossConfig, the settings of the loss.

A variant is a function below and a row of SURROGATES; nothing else names it. The table provides the values that
learner.loss.ratio may have, its settings and their defaults, --help and docs/losses.md.

A function gets Tokens and its settings by name, and returns for the N tokens
    [N] the objective, which autograd differentiates by the logprobs, and
    [N] bool, whether the ratio is out of a bound (metric policy/clip_fraction).

This module imports no torch, since the driver, which imports the table, does not load torch. The functions use methods
of tensors only.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field, field_validator, model_validator, with_config
from typing_extensions import TypedDict

from cluster.config import Frozen, Positive
from learner.algo.advantage import ADVANTAGES, LOSSES

if TYPE_CHECKING:
    from torch import Tensor

    from learner.algo.loss import Tokens

Interval = tuple[float, float]
Objective = tuple["Tensor", "Tensor"]


Upper = Annotated[float, Field(ge=1, allow_inf_nan=True)]


@with_config(ConfigDict(extra="forbid", allow_inf_nan=False))
class Bounds(TypedDict, total=False):
    """The settings that surrogates may have, each with the range that is valid whatever the others are."""

    epsilon: tuple[Positive, Positive]  # width of the clip range below and above 1
    delta: Positive
    cap: Annotated[float, Field(ge=1)]
    band: tuple[Annotated[float, Field(ge=0, le=1)], Upper]
    temperature: tuple[Positive, Positive]  # of tokens with a positive advantage, and of the others
    divergence: Annotated[float, Field(gt=0, le=1)]  # between probabilities of a token


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A row of SURROGATES: a surrogate objective and what is said of it."""

    function: Callable[..., Objective]
    equation: str  # the objective of a token, for docs/losses.md
    paper: str
    settings: Bounds  # its settings, with the paper's values
    several_updates: bool = False  # whether it uses Tokens.stale, so that learner.updates_per_batch may be above 1


def masked(tokens: "Tokens", cap: float, band: Interval) -> Objective:
    """The default, for one update per batch: the ratio then differs from 1 by engine mismatch and staleness alone.

    A ratio far outside of the band means that sampler and learner disagree about the token, so the token is dropped.
    The cap bounds the variance of the others. Neither TIS nor IcePop does both.
    """
    weight = tokens.sg_ratio.clamp(max=cap).where(_inside(tokens.sg_ratio, band), 0.0)
    return tokens.weighted(weight), weight != tokens.sg_ratio


def truncated(tokens: "Tokens", cap: float) -> Objective:
    """Truncated importance sampling: no token loses its gradient, however large its ratio is."""
    return tokens.weighted(tokens.sg_ratio.clamp(max=cap)), tokens.sg_ratio > cap


def icepop(tokens: "Tokens", band: Interval) -> Objective:
    """IcePop drops a token whose ratio is out of the band."""
    inside = _inside(tokens.sg_ratio, band)
    return tokens.weighted(tokens.sg_ratio.where(inside, 0.0)), ~inside


def sequence_mask(tokens: "Tokens", band: Interval) -> Objective:
    """Drops a completion whose ratio s is out of the band; the rest is unbiased. With the same mismatch per token, s is
    further from 1 the longer the completion, so long completions are dropped first."""
    return icepop(tokens.over_completions("sum"), band)


def sequence_truncate(tokens: "Tokens", cap: float) -> Objective:
    """Does what `truncated` does, with one ratio for all tokens of a completion."""
    return truncated(tokens.over_completions("sum"), cap)


def gspo(tokens: "Tokens", epsilon: Interval, delta: float) -> Objective:
    """GSPO clips the ratio of a completion. The paper's mean over completions is that of loss.kind: grpo; with `dapo`
    or `dr_grpo` long completions weigh more."""
    return _ppo(tokens.over_completions("mean"), epsilon, delta)


def gmpo(tokens: "Tokens", epsilon: Interval) -> Objective:
    """GMPO has the geometric mean of a completion's ratios, each clipped by itself, where GRPO has the mean of their
    objectives: a token far from the others moves it less. The paper's mean over completions is that of loss.kind: grpo.
    A token whose ratio is clipped has no gradient; the others have that of the geometric mean."""
    bounded, held = _bounded(tokens, epsilon, float("inf"))
    logs = bounded.log().where(bounded != tokens.sg_ratio, tokens.log_ratio)
    mean = replace(tokens, log_ratio=logs).over_completions("mean").sg_ratio
    return mean * tokens.advantages * tokens.unit.detach().where(held, tokens.unit), held


def sapo(tokens: "Tokens", temperature: Interval) -> Objective:
    """SAPO has a soft gate in the place of a clip: the weight of a token falls on both sides of r = 1, the sooner the
    higher the temperature is, which is higher for tokens that are to become less likely."""
    high, low = temperature
    steep = tokens.advantages.new_full((), high).where(tokens.advantages > 0, low)
    gate = (steep * (tokens.ratio - 1)).sigmoid()
    return 4 / steep * gate * tokens.advantages, tokens.sg_ratio > float("inf")


def dppo(tokens: "Tokens", divergence: float, cap: float) -> Objective:
    """DPPO by its binary total variation: a token is dropped where its probability, not its ratio, has already moved
    too far in the direction of its advantage. A rare token may have any ratio up to the cap, a likely one may not."""
    moved = tokens.sg_logprobs.exp() - (tokens.sg_logprobs - tokens.log_ratio).exp()
    too_far = (moved * tokens.advantages.sign()) > divergence
    return tokens.weighted(tokens.sg_ratio.clamp(max=cap).where(~too_far, 0.0)), too_far | (tokens.sg_ratio > cap)


def clip(tokens: "Tokens", epsilon: Interval, delta: float, cap: float) -> Objective:
    """PPO's clipped objective. With several updates per batch it is decoupled PPO: the ratio to the policy that the
    batch began with is clipped, and that policy's ratio to the sampler, capped, is a weight of the token."""
    objective, held = _ppo(tokens, epsilon, delta)
    if tokens.stale is None:
        return objective, held
    return tokens.stale.clamp(max=cap) * objective, held | (tokens.stale > cap)


def _ppo(tokens: "Tokens", epsilon: Interval, delta: float) -> Objective:
    """Returns min(r A, clip(r, 1 - low, 1 + high) A), and whether a bound holds for the token's ratio r: where A > 0, r
    counts at most 1 + high; where A < 0, at least 1 - low.

    Where a bound holds, the objective is constant; elsewhere it has the ratio's gradient. For A < 0 that minimum leaves
    r unbounded above, and a token with a gap of 5 nats between learner and sampler would weigh 148 times another, so r
    counts at most delta there (dual-clip PPO).
    """
    bounded, held = _bounded(tokens, epsilon, delta)
    return bounded.where(held, tokens.ratio) * tokens.advantages, held


def _bounded(tokens: "Tokens", epsilon: Interval, delta: float) -> tuple["Tensor", "Tensor"]:
    """Returns the ratios within these bounds, and whether a bound holds for the token: never where A = 0."""
    ratio, advantage = tokens.sg_ratio, tokens.advantages
    bounded = ratio.clamp(max=1 + epsilon[1]).where(advantage > 0, ratio.clamp(1 - epsilon[0], delta))
    return bounded, (bounded != ratio) & (advantage != 0)


def _inside(ratio: "Tensor", band: Interval) -> "Tensor":
    """Whether the ratio is finite and in the band. The upper end of a band may be infinite, but no weight may be."""
    return (ratio >= band[0]) & (ratio <= band[1]) & (ratio < float("inf"))


# MiniMax-M1 does not say which cap cispo has, so the cap is ScaleRL's; as in the paper's runs there is no lower bound.
SURROGATES: dict[str, Surrogate] = {
    "masked": Surrogate(
        masked,
        "sg(min(r, cap)) A log π where r is in the band, else 0",
        "ours: the cap of truncated within the band of icepop",
        {"cap": 2.0, "band": (0.5, 5.0)},
    ),
    "truncated": Surrogate(
        truncated,
        "sg(min(r, cap)) A log π",
        "truncated importance sampling, Ionides 2008; to the sampler: TIS, Yao et al. 2025",
        {"cap": 2.0},
    ),
    "icepop": Surrogate(
        icepop,
        "sg(r) A log π where r is in the band, else 0",
        "IcePop 2510.18855; as an equation: INTELLECT-3 2512.16144, 1",
        {"band": (0.5, 5.0)},
    ),
    "cispo": Surrogate(
        truncated,
        "sg(min(r, cap)) A log π",
        "MiniMax-M1 2506.13585, equations 4 and 5; the cap: ScaleRL 2510.13786",
        {"cap": 5.0},
    ),
    "sequence_mask": Surrogate(
        sequence_mask,
        "sg(s) A log π where s is in the band, else 0",
        "Liu et al. 2025, When Speed Kills Stability; TRL's default against its vLLM "
        "(vllm_importance_sampling_mode), and its values",
        {"band": (0.0, 3.0)},
    ),
    "sequence_truncate": Surrogate(
        sequence_truncate,
        "sg(min(s, cap)) A log π",
        "vllm_importance_sampling_mode: sequence_truncate in TRL, and its value",
        {"cap": 3.0},
    ),
    "gspo": Surrogate(
        gspo,
        "min(g A, clip(g, 1 - epsilon_low, 1 + epsilon_high) A); where A < 0, g counts at most delta",
        "GSPO 2507.18071, equations 5 and 7; delta as for clip",
        {"epsilon": (3e-4, 4e-4), "delta": 4.0},
    ),
    "gmpo": Surrogate(
        gmpo,
        "q A, where q is the geometric mean over the completion of min(r, 1 + epsilon_high) if A > 0, else of "
        "max(r, 1 - epsilon_low)",
        "GMPO 2507.20673, equation 4; its clip range is from e^-0.4 to e^0.4",
        {"epsilon": (0.3297, 0.4918)},
    ),
    "sapo": Surrogate(
        sapo,
        "(4 / τ) sigmoid(τ (r - 1)) A, with the first temperature as τ where A > 0, else the second",
        "SAPO 2511.20347, equations 5 and 6",
        {"temperature": (1.0, 1.05)},
    ),
    "dppo": Surrogate(
        dppo,
        "sg(min(r, cap)) A log π, but 0 where π - μ (A > 0) or μ - π (A < 0) is above divergence",
        "DPPO 2602.04879, binary total variation, with the values of its authors' scripts",
        {"divergence": 0.15, "cap": 20.0},
    ),
    "clip": Surrogate(
        clip,
        "min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A); where A < 0, r counts at most delta. With several "
        "updates per batch: times sg(min(μ / sampler, cap))",
        "PPO 1707.06347, equation 7; epsilon: DAPO 2503.14476; delta: dual-clip PPO, Ye et al. 1912.09729, equation 5, "
        "with the value of INTELLECT-2 2505.07291, section 3.4; decoupled PPO: Hilton et al. 2110.00641, section 3, "
        "and AReaL 2505.24298, section 5.2",
        {"epsilon": (0.2, 0.28), "delta": 4.0, "cap": 2.0},
        several_updates=True,
    ),
}


OWN = "path/file.py:function"

if TYPE_CHECKING:
    Kind: TypeAlias = str
    Advantage: TypeAlias = str
else:  # a type checker cannot evaluate the names of the tables
    Kind, Advantage = Literal[tuple(LOSSES)], Literal[tuple(ADVANTAGES)]


class LossConfig(Frozen):
    """GRPO variants: docs/losses.md lists them, with equations, papers and the values of null."""

    kind: Kind = "dapo"
    """What the loss is a mean over: `dapo` all tokens, `grpo` the tokens of each completion and then the completions;
    `dr_grpo` divides by a constant. `dapo` for long completions of different lengths."""
    ratio: Annotated[str, Field(examples=[*SURROGATES, OWN])] = "masked"
    """What bounds the ratio of policy to sampler: [losses.md](losses.md) has equations, papers, and how to write one of
    your own. `sequence_mask` is TRL's default; `clip` is PPO's and goes with `updates_per_batch`."""
    bounds: Bounds = Field(default_factory=lambda: Bounds())
    """Arguments of `ratio`; what is left out has the paper's value. `epsilon: [low, high]` is the clip range below and
    above 1; `delta` is the most that the ratio of a completion with a negative advantage counts, above the clip range;
    `cap` is the most that a ratio counts; tokens outside of `band: [low, high]` are dropped (`.inf`: none above);
    `temperature: [positive, negative]` by the sign of the advantage; `divergence` is between probabilities."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference. With LoRA that is the model with its adapter switched off, no second model;
    with `learner.mode: full` a second set of weights (`model.reference_dtype`). Raise it to stay close."""
    teacher_top: Annotated[int, Field(ge=0, le=20)] = 0
    """With `model.teacher`: its likeliest tokens at each place, over which, and all others as one, the KL is taken
    exactly. 0: it is asked for the sampled token alone. More: less noise, and that many numbers for each token."""
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
        """Whether the surrogate may be used with learner.updates_per_batch above 1."""
        return not self.own and SURROGATES[self.ratio].several_updates

    @property
    def arguments(self) -> Bounds:
        """The settings with which the surrogate is called: the paper's values, replaced by `bounds`. A user's own
        function is called with `bounds` alone, and its parameters' defaults stand for the rest."""
        papers = Bounds() if self.own else SURROGATES[self.ratio].settings
        return papers | self.bounds

    @field_validator("ratio")
    @classmethod
    def _ratio_is_known(cls, ratio: str) -> str:
        place, _, function = ratio.rpartition(":")
        if ratio in SURROGATES or (place and function.isidentifier()):
            return ratio
        near = get_close_matches(ratio, SURROGATES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"must be one of {', '.join(SURROGATES)}, or a function of your own as {OWN}{hint}")

    @field_validator("bounds", mode="before")
    @classmethod
    def _bounds_are_numbers(cls, bounds: Any) -> Any:
        """Refuses unknown names, and bools, which would count as the numbers 0 and 1."""
        if not isinstance(bounds, dict):
            raise ValueError(f"must be given by name, for example {{cap: 2}} (got {bounds!r})")
        for name, value in bounds.items():
            if name not in Bounds.__annotations__:
                raise ValueError(
                    f"must be {', '.join(Bounds.__annotations__)}, got {name!r}; take the one that is meant, or leave "
                    "it out"
                )
            if any(isinstance(one, bool) for one in (value if isinstance(value, list | tuple) else [value])):
                raise ValueError(f"{name} must be a number, or two (got {value})")
        return bounds

    @model_validator(mode="after")
    def _bounds_are_used(self) -> "LossConfig":
        known = self.arguments if self.own else SURROGATES[self.ratio].settings
        for name, value in self.bounds.items():
            if name not in known:
                users = ", ".join(ratio for ratio, row in SURROGATES.items() if name in row.settings)
                shown = list(value) if isinstance(value, tuple) else value
                raise ValueError(
                    f"bounds.{name}: belongs to ratio: {users}, and {self.ratio} has none; leave it out, or set one of "
                    f"them (got {name}={shown})"
                )
        found = self.arguments
        if "delta" in found and "epsilon" in found and found["delta"] <= 1 + found["epsilon"][1]:
            raise ValueError(
                f"bounds.delta: must be above 1 + epsilon's upper part, {1 + found['epsilon'][1]:g}, or it would cut "
                f"what the clip lets through; raise it (got {found['delta']:g})"
            )
        return self
