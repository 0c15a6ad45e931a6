"""What the learner does with a batch: adapter, loss, optimizer, schedule, memory of a step."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cluster.config import Frozen, Positive

AUTO_TOKEN_BUDGET = 8192  # tokens of a micro-batch where no plan says otherwise


class LoraConfig(Frozen):
    """LoRA (Hu et al. 2021): W + alpha/rank * B A on the target modules; lm_head and embeddings never."""

    rank: Literal[8, 16, 32, 64, 128, 256] = 16  # the ranks that vLLM serves
    alpha: Positive = 32.0
    targets: Literal["all-linear"] | list[str] = "all-linear"


class ScheduleConfig(Frozen):
    """Learning-rate schedule; `warmup` is a fraction of the run's steps."""

    kind: Literal["constant", "cosine"] = "constant"
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05


class OptimizerConfig(Frozen):
    """AdamW, bitsandbytes' 8-bit AdamW, or the same with states that CUDA may page out to host memory."""

    kind: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Positive = 1.0


class LossConfig(Frozen):
    """GRPO variants; equations and papers in learner/loss.py and learner/advantage.py."""

    kind: Literal["dapo", "dr_grpo", "grpo"] = "dapo"
    ratio: Literal["masked", "truncated", "icepop", "cispo", "gspo", "clip"] = "masked"
    epsilon: tuple[Positive, Positive] | None = None  # clip range below and above 1; null: the papers', by ratio
    beta: Annotated[float, Field(ge=0)] = 0.0  # weight of the k3 KL to the reference
    advantage: Literal["group", "batch", "none"] = "batch"  # what the centred reward is divided by

    @model_validator(mode="after")
    def _epsilon_is_used(self) -> "LossConfig":
        if self.epsilon is not None and self.ratio not in ("clip", "gspo"):
            raise ValueError(
                f"epsilon is the clip range of ratio: clip or gspo, {self.ratio} has none; leave it out, or set one of "
                f"them (got epsilon={list(self.epsilon)})"
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
        return self
