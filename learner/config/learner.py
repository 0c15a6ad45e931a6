"""What the learner does with a batch: adapter, loss, optimizer, schedule, memory of a step."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from cluster.config import Frozen, Positive
from cluster.memory.units import LoraRank, OptimizerKind
from learner.algo.loss_config import LossConfig

AUTO_TOKEN_BUDGET = 8192  # tokens of a micro-batch where no plan says otherwise


class LoraConfig(Frozen):
    """LoRA (Hu et al. 2021): W + alpha/rank * B A on the target modules; lm_head and embeddings never.

    With model.adapter, what is left out here is the adapter's.
    """

    rank: LoraRank = 16
    """Of the adapter, one that vLLM serves. Raise it for more capacity, at more memory and a larger push."""
    alpha: Positive = 32.0
    """The adapter counts alpha / rank times; usually twice the rank. Raise it to let the same weights change more."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Layers that are adapted, by the end of their names. A shorter list takes less memory and learns less."""

    @field_validator("targets", mode="before")
    @classmethod
    def _names_are_listed(cls, targets: Any) -> Any:
        """To PEFT a text is a regular expression, which may choose single blocks; what is known of an adapter here are
        the ends of names."""
        if targets == [] or (isinstance(targets, str) and targets != "all-linear"):
            raise ValueError(
                "must be all-linear, or a list of the ends of layers' names such as [q_proj, v_proj], no regular "
                f"expression; write the names out (got {targets!r})"
            )
        return targets


class ScheduleConfig(Frozen):
    """Learning-rate schedule; `warmup` is a fraction of the run's steps."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """The rate after the warm-up; `linear` and `cosine` fall to 0 at the end of the run, for a length known before."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Part of the run's steps in which the rate rises from 0. Raise it where the first steps harm."""


class OptimizerConfig(Frozen):
    """AdamW, with float32 masters or without; bitsandbytes' 8-bit AdamW, or the same with states that CUDA may page out
    to host memory."""

    kind: OptimizerKind = "adamw"
    """The others save memory, which matters for full fine-tuning: `adamw_rounded` updates bfloat16 weights without
    float32 masters, rounded at random (12 bytes a weight in place of 20), the 8-bit kinds do so with states in 8 bits
    (6 bytes); the paged one needs CUDA."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """Decay of AdamW's averages of the gradient and of its square. A lower second one forgets peaks sooner."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Of matrices; norms and biases do not decay. Raise it for full fine-tuning over many epochs."""
    max_grad_norm: Positive = 1.0
    """The gradient's norm is clipped to it. Lower it where `loss/grad_norm` has peaks that harm."""


class ValueConfig(Frozen):
    """PPO's value model: an adapter of its own on the base of all roles, and a float32 head. Optimizer, schedule and
    updates per batch are the policy's."""

    start: str | None = None
    """Folder of a reward model to start from (an adapter with a scalar head, in PEFT's form); null: a new adapter of
    the policy's rank and targets, whose value is 0 everywhere. A reward model knows from the first step what is
    good."""
    learning_rate: Positive = 1e-4
    """Several times the policy's: what it has to follow moves with every step. Lower it where `value/loss` jumps."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """What a token later counts. Below 1 short completions are preferred."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Of GAE: 1 trusts the rewards that came, 0 the value of the next token. Raise it where `value/explained_variance`
    stays low, or completions are so long that a reward at their end never reaches their beginning."""
    clip: Positive | None = 0.2
    """How far a batch may move a value, in units of the reward; null: without bound. It matters only with
    `updates_per_batch` above 1: the first update of a batch begins at the old values."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Steps at the start in which the value alone learns. Set it where the policy gets worse before it gets better."""


class LearnerConfig(Frozen):
    """The learner's update."""

    algorithm: Literal["grpo", "ppo"] = "grpo"
    """Where advantages come from: `grpo` compares the completions of a group; `ppo` asks a value model, token by token,
    and needs no groups. PPO for rewards of turns or long trajectories, where one number for all tokens says little."""
    value: ValueConfig = ValueConfig()
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
    reduce: Literal["auto", "exact", "fast"] = "auto"
    """How gradients of micro-batches are added. `exact`: without rounding, so that the number of ranks
    (`cluster.learners`) changes no bit; 16 bytes more for each weight of the adapter, and finer micro-batches. `fast`:
    in float32. `auto`: `exact` with several ranks, of LoRA."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Times that a learner which died or hangs (`cluster.deadlines.heartbeat`) is replaced, and the run goes on by
    itself from the last checkpoint. Set it for long runs that nobody watches."""

    @property
    def pushes_adapters(self) -> bool:
        """Whether the generators hold adapters; else whole weights are replaced."""
        return self.mode == "lora" and self.push == "adapter"
