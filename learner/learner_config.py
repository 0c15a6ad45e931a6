"""What the learner does with a batch: adapter, loss, optimizer, schedule, memory of a step."""

from typing import Annotated, Literal, TypedDict, cast

from pydantic import Field, model_validator

from cluster.config import Frozen, Positive

AUTO_TOKEN_BUDGET = 8192  # tokens of a micro-batch where no plan says otherwise


class LoraConfig(Frozen):
    """LoRA (Hu et al. 2021): W + alpha/rank * B A on the target modules; lm_head and embeddings never.

    With model.adapter, what is left out here is the adapter's.
    """

    rank: Literal[8, 16, 32, 64, 128, 256] = 16  # the ranks that vLLM serves
    alpha: Positive = 32.0
    targets: Literal["all-linear"] | list[str] = "all-linear"


class ScheduleConfig(Frozen):
    """Learning-rate schedule; `warmup` is a fraction of the run's steps."""

    kind: Literal["constant", "linear", "cosine"] = "constant"  # the others fall to 0 at the end of the run
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05


class OptimizerConfig(Frozen):
    """AdamW, bitsandbytes' 8-bit AdamW, or the same with states that CUDA may page out to host memory."""

    kind: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Positive = 1.0


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
    ratio: Literal["masked", "truncated", "icepop", "cispo", "sequence_mask", "sequence_truncate", "gspo", "clip"] = (
        "masked"
    )
    epsilon: tuple[Positive, Positive] | None = None  # clip range below and above 1; null here and below: BOUNDS
    delta: Positive | None = None  # most that the ratio of a sample with A < 0 counts, above the clip range
    cap: Annotated[float, Field(ge=1)] | None = None  # most that a ratio counts
    band: tuple[Annotated[float, Field(ge=0, le=1)], Annotated[float, Field(ge=1)]] | None = None  # outside: dropped
    beta: Annotated[float, Field(ge=0)] = 0.0  # weight of the k3 KL to the reference
    advantage: Literal["group", "batch", "none"] = "batch"  # whose rewards' deviation the centred reward is divided by
    mask_truncated: bool = False  # completions cut at max_completion_length count in the advantages, but do not train

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
    """The learner's update. `token_budget`: tokens of a micro-batch, a shared prompt once; auto = 8192.

    `updates_per_batch`: optimizer steps per batch, hence per policy version, each on its share of the groups.
    """

    mode: Literal["lora", "full"] = "lora"  # full: every weight of the model, no adapter
    push: Literal["adapter", "merged"] = "adapter"  # merged: the generators get base + adapter as one, and run no LoRA
    lora: LoraConfig = LoraConfig()
    groups_per_step: Annotated[int, Field(ge=1)] = 8
    updates_per_batch: Annotated[int, Field(ge=1)] = 1
    learning_rate: Positive = 2e-5
    schedule: ScheduleConfig = ScheduleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    checkpointing: Literal["none", "full", "mlp", "auto"] | Annotated[int, Field(ge=1)] = "auto"  # k: of the layers
    offload_boundaries: bool = False  # what checkpointing: full keeps goes to host memory; for very long sequences
    token_budget: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    restarts: Annotated[int, Field(ge=0)] = 0  # times that a learner which died or hangs goes on from a checkpoint

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
