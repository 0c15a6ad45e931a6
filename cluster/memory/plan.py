"""What is asked of the planner, and what it answers."""

from dataclasses import dataclass
from typing import Literal

from cluster.memory import shape as units
from cluster.memory.generator import ENGINE_PROCESS, asleep, engine_processes
from cluster.memory.learner import (
    FILE_BYTES,
    FILE_COPIES,
    LEARNER_PROCESS,
    SHARDS_COPIES,
    STORE_COPIES,
    ReferenceKind,
    divided_params,
    pushed_bytes,
    undo_bytes,
    value_params,
)
from cluster.memory.shape import DTYPE_BYTES, LINEAR, Checkpointing, OptimizerKind, Parts, Shape

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


# What a run on cards takes of the machine's main memory, in bytes, by part. On a CPU the plan itself is of it.

# Resident sets in the middle of a run on two cores (configs/local_cpu.yaml, Linux, Ray 2.60), shared pages included:
# the driver; Ray's own processes together; one reward process.
DRIVER, RAY, REWARD = 330 * 10**6, 360 * 10**6, 150 * 10**6
ENVIRONMENT_SERVER, ENVIRONMENT = 290 * 10**6, 11 * 10**6  # what they are forked from; what each then writes itself
CUDA_LIBRARIES = 1500 * 10**6  # of each process on a card, beside torch: cuBLAS, kernels, pinned buffers (estimate)


def host_bytes(
    found: Plan,
    wish: Wish,
    *,
    object_store: int,
    learners: int = 1,
    reward_processes: int = 1,
    reward_models: int = 0,
    environments: int = 0,
) -> Parts:
    """Main memory of one machine that runs the plan.

    driver, ray, rewards (`reward_processes` in all; a function of the user's that loads a model takes
      its own on top, up to rollout.reward_memory): measured. learner, generators: their processes without a model,
      measured on a CPU, and CUDA's libraries (estimate).
    reward_models: bytes of the weights that each reward process loads for `use: sequence_classifier`; with any, it
      holds torch as well, as the learner's process does.
    environments: as many at once beside each generator, measured with tools in Python; what they load themselves comes
      on top, up to env.memory.
    object_store: what it may take; Ray keeps it in /dev/shm.
    asleep: weights and adapters of generators that sleep (vLLM's sleep level 1), pinned.
    learners: ranks of the learner, each with its own of what follows.
    offloaded: learner.offload_boundaries. undo: of several ranks, what each step began with. paged: the states of
      paged_adamw_8bit, once the card is full. policy: whole weights, where the generators read them (of those that come
      through the object store, where the processes of a generator of several do).
    passing: the most of what comes and goes: the learner's weights as they are loaded (4 bits and shards matrix by
      matrix), copies of a push of whole weights, or what a checkpoint of a whole model is writing. vLLM
      reads mapped files: those pages are cache, and given back when memory is wanted.
    """
    shape, b, n = found.shape, DTYPE_BYTES[wish.dtype], found.shape.params
    pushed = pushed_bytes(shape, wish.mode, wish.push, wish.targets, b)
    stored = found.generators * SHARDS_COPIES if found.shards > 1 else 0
    saving = _saving(found, wish, learners) if wish.mode == "full" else 0
    asleep = found.generator["weights"] + found.generator["lora_slots"] if found.layout == "alternating" else 0
    each = reward_models + LEARNER_PROCESS if reward_models else REWARD
    return {
        "driver": DRIVER,
        "ray": RAY,
        "object_store": object_store,
        "rewards": reward_processes * each,
        "environments": found.generators * (ENVIRONMENT_SERVER + environments * ENVIRONMENT) if environments else 0,
        "learner": learners * (LEARNER_PROCESS + CUDA_LIBRARIES),
        "generators": found.generators * engine_processes(found.shards) * (ENGINE_PROCESS + CUDA_LIBRARIES),
        "asleep": found.generators * asleep,
        "offloaded": learners * shape.layers * b * shape.hidden * found.token_budget if wish.offload else 0,
        "undo": learners * _undo(shape, wish) if wish.undo else 0,
        "policy": (stored if wish.undo else FILE_COPIES) * pushed,
        "paged": learners * 2 * n if wish.optimizer == "paged_adamw_8bit" else 0,
        "passing": max(learners * _loading(found, wish), STORE_COPIES * pushed if wish.undo else 0, saving),
    }


def _loading(found: Plan, wish: Wish) -> int:
    """Of one learner's weights, as they are loaded; those of a generator are mapped."""
    shape, b = found.shape, DTYPE_BYTES[wish.dtype]
    if wish.shared:
        return 0
    return b * shape.params if found.base == "none" and wish.base_ranks == 1 else b * shape.vocab * shape.hidden


def _saving(found: Plan, wish: Wish, learners: int) -> int:
    """Of a whole model its largest matrix, in float32; in shards what one file holds, and its bytes as they are
    written."""
    if wish.base_ranks > 1:
        return learners * 2 * min(FILE_BYTES, 12 * divided_params(found.shape, wish.base_ranks))
    return 4 * found.shape.vocab * found.shape.hidden


def _undo(shape: Shape, wish: Wish) -> int:
    """Of one rank: of its adapter, and of PPO's value."""
    value = sum(value_params(shape, wish.value_rank, wish.targets))
    return undo_bytes(shape.lora_params(wish.rank, wish.targets) + value, wish.optimizer)
