"""How a learner trains, and on what, as far as it matters for memory."""

from dataclasses import dataclass
from typing import Literal

from cluster.memory.shape import LINEAR, Shape
from cluster.memory.units import Checkpointing, OptimizerKind

ReferenceKind = Literal["none", "auto", "int8"]


@dataclass(frozen=True, slots=True)
class Micro:
    """Tokens of the largest micro-batch."""

    tokens: int  # N
    completion: int  # C
    keys: int  # S

    @classmethod
    def of(cls, prompt: int, completion: int, generations: int, budget: int) -> "Micro":
        """The micro-batch that fills the budget, or holds one completion if that is longer, packed as learner.batch
        does it, with prompts and completions at their greatest length. A group beyond the budget is split, and its
        prompt is repeated in every part.

        No micro-batch has more tokens, but it may have more keys: 1 + prompt / (tokens of a completion) per token, so
        completions that end early under long prompts have more, up to 1 + generations. If those do not fit, the step is
        retried with half the budget.
        """
        own = max(completion - 1, 1)
        tokens = max(budget, prompt + own)
        each = min(generations, (tokens - prompt) / own)
        keys = prompt + each * (prompt + own) if each > 1 else prompt + own
        groups = tokens / (prompt + each * own)
        return cls(tokens, round(groups * each * completion), round(groups * keys))


@dataclass(frozen=True, slots=True)
class Learning:
    """How a learner trains, as far as it matters for memory."""

    mode: Literal["lora", "full"] = "lora"
    push: Literal["adapter", "merged"] = "adapter"
    rank: int = 16
    targets: tuple[str, ...] = tuple(LINEAR)
    dtype: str = "bfloat16"
    base: Literal["none", "nf4"] = "none"
    optimizer: OptimizerKind = "adamw"
    checkpointing: Checkpointing = "full"
    frozen_ranks: tuple[int, ...] = ()  # of the adapters of the reference and of reward models
    reference: ReferenceKind = "none"  # of mode full: a second set of weights
    offload: bool = False  # boundaries of checkpointing=full in host memory
    cuda: bool = True
    value_rank: int = 0  # of PPO's value, an adapter on the same targets; 0: there is none
    exact: bool = False  # learner.reduce: gradients are added in two float64 parts
    undo: bool = False  # of several ranks each keeps in main memory what its step began with
    ranks: int = 1  # over which the base is divided (memory.base: sharded)
    fused: bool = True  # norms and MLPs as operations of learner.model.fusion, which other learners have not

    def keeps_floats(self, shape: Shape) -> bool:
        """Whether norms keep float32 copies of their inputs: transformers' own do, and Gemma's are never fused."""
        return shape.gemma or not self.fused

    @property
    def segments(self) -> bool:
        """Whether a card's attention goes segment by segment, with each key once for each query head. FlashAttention
        takes neither float32 nor a card below compute capability 8, whose type of 16 bits is float16: with that type on
        a newer card the plan is too large."""
        return self.cuda and self.dtype != "bfloat16"

    def keeps_gates(self, shape: Shape) -> bool:
        """Whether MLPs keep their gate's activation: all but the SwiGLU of a card."""
        return self.keeps_floats(shape) or shape.activation != "silu" or not self.cuda
