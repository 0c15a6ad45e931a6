"""What is asked of the planner, and what it answers."""

from dataclasses import dataclass
from typing import Literal

from cluster.memory import units
from cluster.memory.generator import asleep
from cluster.memory.learning import ReferenceKind
from cluster.memory.shape import LINEAR, Shape
from cluster.memory.units import Checkpointing, OptimizerKind, Parts

USABLE = 0.97  # of a device's bytes: the driver, a display and other processes have the rest
# What the learner keeps on the card while the engine is awake (alternating): its allocator's cache is given back, but
# for segments that still hold something, which `fragmentation` stands for.
BETWEEN = ("weights", "adapters", "gradients", "optimizer", "reference", "fragmentation", "context")

Layout = Literal["separate", "slices", "alternating"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked of the model, tokens and counts."""

    generations: int = 8
    prompt: int = 256
    completion: int = 256
    sequences: int = 128  # most that are decoded at once
    adapters: int = 2  # policy versions that a generator holds
    generators: int = 1  # on one device
    shards: int = 1  # processes of each, which have a card each
    learners: int = 1  # likewise
    groups: int | None = None  # of a step, if that is known

    @property
    def whole(self) -> int:
        """Tokens of one completion with its prompt."""
        return self.prompt + self.completion

    @property
    def longest(self) -> int:
        """The same as they are trained: the last token predicts nothing."""
        return self.whole - 1

    @property
    def group(self) -> int:
        """Tokens of a packed group."""
        return self.prompt + self.generations * (self.completion - 1)

    @property
    def most(self) -> float:
        """Tokens of a step: no micro-batch has more."""
        return float("inf") if self.groups is None else self.groups * self.group


@dataclass(frozen=True, slots=True)
class Wish:
    """What is fixed; None is the planner's choice."""

    mode: Literal["lora", "full"] = "lora"
    push: Literal["adapter", "merged"] = "adapter"
    rank: int = 16
    targets: tuple[str, ...] = tuple(LINEAR)
    dtype: str = "bfloat16"
    optimizer: OptimizerKind = "adamw"
    frozen_ranks: tuple[int, ...] = ()
    value_rank: int = 0
    reference: ReferenceKind = "none"
    offload: bool = False
    base: Literal["none", "nf4"] | None = None
    checkpointing: Checkpointing | None = None
    token_budget: int | None = None
    kv_bytes: int | None = None
    kv_dtype: str = "bfloat16"  # or fp8
    layouts: tuple[Layout, ...] = ("slices", "alternating")
    exact: bool = False  # learner.reduce
    undo: bool = False  # the learner has several ranks
    shared: bool = False  # memory.base: shared: one base for both roles, the generator's
    base_ranks: int = 1  # over which the learner's base is divided (memory.base: sharded)
    cuda: bool = True
    learner_cap: int | None = None  # bytes that a role may have at most
    generator_cap: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings that fit, and what they take, by part."""

    shape: Shape
    device_bytes: int
    layout: Layout
    base: Literal["none", "nf4"]
    checkpointing: Checkpointing
    token_budget: int
    kv_bytes: int
    sequences: int  # of full length that the KV cache holds at once
    learner: Parts  # of one
    generator: Parts  # likewise, of one of its cards
    generators: int = 1
    learners: int = 1
    shards: int = 1  # of a generator, over which kv_bytes are spread

    @property
    def learner_bytes(self) -> int:
        return units.total(self.learner)

    @property
    def generator_bytes(self) -> int:
        return units.total(self.generator)

    @property
    def generator_room(self) -> int:
        """Bytes that one generator may come to: its plan, and in slices what the learner's leaves."""
        left = USABLE * self.device_bytes - self.learners * self.learner_bytes if self.layout == "slices" else 0
        return max(self.generator_bytes, int(left / self.generators))

    @property
    def device_peak(self) -> int:
        """The most that one device must have."""
        learner, generator = self.learners * self.learner_bytes, self.generators * self.generator_bytes
        if self.layout == "separate":
            return max(learner, generator)
        if self.layout == "slices":
            return learner + generator
        between = sum(self.learner[name] for name in BETWEEN)
        return max(between + generator, learner + self.generators * units.total(asleep(self.generator)))


@dataclass(frozen=True, slots=True)
class Misfit:
    """Nothing that may be chosen fits. `advice`: single changes that would make it fit, the mildest first."""

    shape: Shape
    device_bytes: int
    least: Plan  # the choice that needs least
    advice: tuple[str, ...]

    @property
    def needs(self) -> int:
        """Bytes that a device would need for `least`."""
        return round(self.least.device_peak / USABLE)

    def __str__(self) -> str:
        return (
            f"memory.device: {self.shape.name} needs {gib(self.needs)} with the least of settings, "
            f"{gib(self.device_bytes)} are there. Change one of: {'; '.join(self.advice)}"
        )


def gib(count: float) -> str:
    """Bytes as text."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
