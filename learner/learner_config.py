"""What the learner does with a batch: adapter, loss, optimizer, schedule, memory of a step."""

from typing import Annotated, Literal, TypedDict, cast

from pydantic import Field, model_validator

from cluster.config import Frozen, Positive

AUTO_TOKEN_BUDGET = 8192  # tokens of a micro-batch where no plan says otherwise


class LoraConfig(Frozen):
    """LoRA (Hu et al. 2021): W + alpha/rank * B A on the target modules; lm_head and embeddings never.

    With model.adapter, what is left out here is the adapter's.
    """

    rank: Literal[8, 16, 32, 64, 128, 256] = 16
    """Of the adapter, one that vLLM serves. Raise it for more capacity, at more memory and a larger push."""
    alpha: Positive = 32.0
    """The adapter counts alpha / rank times; usually twice the rank. Raise it to let the same weights change more."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Layers that are adapted, by the end of their names. A shorter list takes less memory and learns less."""


class ScheduleConfig(Frozen):
    """Learning-rate schedule; `warmup` is a fraction of the run's steps."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """The rate after the warm-up; `linear` and `cosine` fall to 0 at the end of the run, for a length known before."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Part of the run's steps in which the rate rises from 0. Raise it where the first steps harm."""


class OptimizerConfig(Frozen):
    """AdamW, bitsandbytes' 8-bit AdamW, or the same with states that CUDA may page out to host memory."""

    kind: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """The 8-bit kinds of AdamW save memory, which matters for full fine-tuning; the paged one needs CUDA."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """Decay of AdamW's averages of the gradient and of its square. A lower second one forgets peaks sooner."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of matrices; norms and biases do not decay. Raise it for full fine-tuning over many epochs."""
    max_grad_norm: Positive = 1.0
    """The gradient's norm is clipped to it. Lower it where `loss/grad_norm` has peaks that harm."""


class Bounds(TypedDict, total=False):
    """What a ratio of learner.algo.ratios is held to."""

    epsilon: tuple[float, float]  # below and above 1
    delta: float
    cap: float
    band: tuple[float, float]


# The settings that each ratio has, with the values of the papers (named in learner.algo.ratios). What MiniMax-M1
# leaves open for cispo is of ScaleRL's size (2510.13786); those of the sequence ratios are TRL's; clip's epsilon is
# DAPO's, its cap bounds decoupled PPO's other ratio, with more than one update per batch; delta is INTELLECT-2's.
BOUNDS: dict[str, Bounds] = {
    "masked": {"cap": 2.0, "band": (0.5, 5.0)},
    "truncated": {"cap": 2.0},
    "icepop": {"band": (0.5, 5.0)},
    "cispo": {"cap": 5.0},
    "sequence_mask": {"band": (0.0, 3.0)},
    "sequence_truncate": {"cap": 3.0},
    "gspo": {"epsilon": (3e-4, 4e-4), "delta": 4.0},
    "clip": {"epsilon": (0.2, 0.28), "delta": 4.0, "cap": 2.0},
}


class LossConfig(Frozen):
    """GRPO variants; equations and papers in learner/algo/ratios.py, learner/algo/loss.py and
    learner/algo/advantage.py."""

    kind: Literal["dapo", "dr_grpo", "grpo"] = "dapo"
    """What the loss is a mean over: `dapo` all tokens, `grpo` the tokens of each completion and then the completions;
    `dr_grpo` divides by a constant. `dapo` for long completions of different lengths."""
    ratio: Literal["masked", "truncated", "icepop", "cispo", "sequence_mask", "sequence_truncate", "gspo", "clip"] = (
        "masked"
    )
    """What bounds the ratio of policy to sampler: equations and papers in `learner/algo/ratios.py`. `sequence_mask` is
    TRL's default; `clip` is PPO's and goes with `updates_per_batch`. Bounds that are null are the paper's values."""
    epsilon: tuple[Positive, Positive] | None = None
    """`gspo` and `clip`: the clip range below and above 1."""
    delta: Positive | None = None
    """`gspo` and `clip`: the most that the ratio of a completion with a negative advantage counts."""
    cap: Annotated[float, Field(ge=1)] | None = None
    """`masked`, `truncated`, `cispo`, `sequence_truncate`, `clip`: the most that a ratio counts."""
    band: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=1)]] | None = None
    """`masked`, `icepop`, `sequence_mask`: ratios outside of it are dropped."""
    beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the reference. With LoRA that is the model with its adapter switched off, no second model;
    with `learner.mode: full` a second set of weights (`model.reference_dtype`). Raise it to stay close."""
    advantage: Literal["group", "batch", "none"] = "batch"
    """A reward less the mean of its group is divided by the standard deviation of the rewards of the group or the
    batch, or not at all (`none`: Dr. GRPO). `group` weighs groups of small differences up."""
    mask_truncated: bool = False
    """DAPO: completions cut at `max_completion_length` count in the advantages, but are not trained on. Set it where
    cut completions score badly only for being cut."""

    @property
    def bounds(self) -> Bounds:
        """Those of the chosen ratio."""
        given = {name: getattr(self, name) for name in BOUNDS[self.ratio] if getattr(self, name) is not None}
        return cast(Bounds, BOUNDS[self.ratio] | given)

    @model_validator(mode="after")
    def _bounds_are_used(self) -> "LossConfig":
        for name in Bounds.__annotations__:
            value = getattr(self, name)
            if value is not None and name not in BOUNDS[self.ratio]:
                users = ", ".join(ratio for ratio, own in BOUNDS.items() if name in own)
                shown = list(value) if isinstance(value, tuple) else value
                raise ValueError(
                    f"{name}: belongs to ratio: {users}, and {self.ratio} has none; leave it out, or set one of them "
                    f"(got {name}={shown})"
                )
        bounds = self.bounds
        if "delta" in bounds and bounds["delta"] <= 1 + bounds["epsilon"][1]:
            raise ValueError(
                f"delta: must be above 1 + epsilon's upper part, {1 + bounds['epsilon'][1]:g}, or it would cut what "
                f"the clip lets through; raise it (got {bounds['delta']:g})"
            )
        return self


class LearnerConfig(Frozen):
    """The learner's update."""

    mode: Literal["lora", "full"] = "lora"
    """`lora` trains an adapter, `full` every weight of the model, at several times the memory."""
    push: Literal["adapter", "merged"] = "adapter"
    """`merged`: the generators get base and adapter as one, and decode without LoRA. It pays where a step's decoding
    takes long beside a push of all adapted matrices; with `max_staleness` use it with `in_flight: continue`, else each
    push waits until the generators are idle. In bfloat16 merging rounds the weights once more, so sampler and learner
    differ a little more."""
    lora: LoraConfig = LoraConfig()
    groups_per_step: Annotated[int, Field(ge=1)] = 8
    """Problems per update. More: a steadier gradient, and longer steps."""
    updates_per_batch: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps per batch, by decoupled PPO, each on its share of the groups; above 1 it wants `loss.ratio:
    clip`. For learning more from each batch where generation is dear."""
    learning_rate: Positive = 2e-5
    """LoRA wants about ten times a full fine-tune's rate. Lower it where `policy/mismatch_k3` or `policy/kl` grows."""
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    checkpointing: Literal["none", "full", "mlp", "auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Activations that are computed twice instead of kept: of no layer, all, the MLPs, or the first k layers; `auto`:
    by the memory plan. Less memory, the same gradient to the bit."""
    offload_boundaries: bool = False
    """What `checkpointing: full` keeps goes to host memory; for very long sequences."""
    token_budget: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tokens of a micro-batch, a shared prompt counted once; `auto`: by the memory plan, 8192 without one. The gradient
    does not depend on it; it is halved, and the step taken again, when memory runs out."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Times that a learner which died or hangs (`cluster.deadlines.heartbeat`) is replaced, and the run goes on by
    itself from the last checkpoint. Set it for long runs that nobody watches."""

    @property
    def pushes_adapters(self) -> bool:
        """Whether the generators hold adapters; else whole weights are replaced."""
        return self.mode == "lora" and self.push == "adapter"

    @model_validator(mode="after")
    def _updates(self) -> "LearnerConfig":
        if self.updates_per_batch > self.groups_per_step:
            raise ValueError(
                "updates_per_batch: each update takes at least one group, so it must be at most groups_per_step; got "
                f"{self.updates_per_batch} of {self.groups_per_step}"
            )
        if self.updates_per_batch > 1 and self.loss.ratio != "clip":
            raise ValueError(
                "updates_per_batch: after the first update of a batch the policy is held near the one that the batch "
                "began with by PPO's clip, which is worked out for loss.ratio=clip alone; set that, or 1 (got "
                f"{self.updates_per_batch} with loss.ratio={self.loss.ratio})"
            )
        if self.updates_per_batch == 1 and self.loss.ratio == "clip" and self.loss.cap is not None:
            raise ValueError(
                "loss.cap: with ratio: clip it bounds how far the batch's first policy may be from the sampler, which "
                f"only updates_per_batch above 1 looks at; leave it out (got cap={self.loss.cap:g})"
            )
        return self
