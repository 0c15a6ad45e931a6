"""Types of the memory plan (Workload, Wish, Plan, Misfit), the table of GPUs by name (CARDS), and the main memory that
a planned run takes (host_bytes). The search for a plan is in cluster.memory.search, the memory model in
cluster.memory.learner and .generator.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Literal

from cluster.memory import shape as units
from cluster.memory.generator import (
    ENGINE_PROCESS,
    asleep,
    engine_processes,
)
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
from cluster.memory.shape import ALL, DTYPE_BYTES, Base, Checkpointing, OptimizerKind, Parts, Shape

# GPUs by name. CARDS has MiB as nvidia-smi (NVML) shows them with a driver of 2024 or later. They are less than the GB
# that a GPU is sold with where a part is reserved, for example for error correction. Compute capability is from
# developer.nvidia.com/cuda-gpus, GB/s and TFLOP/s (16 bits on tensor cores, dense, with float32 sums) from NVIDIA's
# data sheets and architecture papers.

BF16, FP8_KV, OLDEST = (8, 0), (8, 9), (7, 5)  # the lowest compute capability with bfloat16, fp8 KV cache, CUDA 13


@dataclass(frozen=True, slots=True)
class CardKind:
    """A model of GPU: its short name, the GB that it is sold with, its bytes of memory, its compute capability, and the
    bytes from and to memory and operations of 16-bit products that it does in a second; 0: not known."""

    name: str
    sold: int
    bytes: int
    capability: tuple[int, int]
    bandwidth: float = 0.0
    flops: float = 0.0

    @property
    def free(self) -> int:
        """Bytes that a run can have on an idle GPU. The driver keeps 454 MiB of an H100's 81559 for itself (nvidia-smi
        -q); of other GPUs it is assumed to keep 3 % or 640 MiB at most, whichever is less."""
        return self.bytes - min(3 * self.bytes // 100, 640 * 2**20)


def lacks(capability: tuple[int, int], *, dtype: str, kv_dtype: str) -> str | None:
    """Returns why a GPU of this compute capability cannot run with these types, and which setting to change; None if it
    can.

    bfloat16 and FlashAttention need 8.0, vLLM's fp8 KV cache needs 8.9, and the wheels of torch and vLLM, built with
    CUDA 13, have no code for GPUs below 7.5.
    """
    own = ".".join(map(str, capability))
    if capability < OLDEST:
        return f"a card of compute capability {own} is older than CUDA 13 supports, 7.5; take a newer one"
    if dtype == "bfloat16" and capability < BF16:
        return f"model.dtype: bfloat16 needs compute capability 8.0, this card has {own}; set model.dtype=float16"
    if kv_dtype == "fp8" and capability < FP8_KV:
        return f"rollout.kv_cache_dtype: fp8 needs compute capability 8.9, this card has {own}; set it to auto"
    return None


def named(text: str) -> tuple[CardKind, ...]:
    """The rows of CARDS that a user's text names (`rtx4090`, `NVIDIA GeForce RTX 4090`, `4090`): several if it leaves
    the size open (`a100`), none if it is unknown."""
    wanted = _plain(text)
    exact = tuple(card for card in CARDS if _plain(card.name) == wanted)
    return exact or tuple(card for card in CARDS if _plain(card.name.partition("-")[0]) == wanted)


OTHERS = frozenset({"ti", "super", "laptop", "mobile", "max"})  # in a name: another card than one without


def kind_of(name: str, size: int) -> CardKind | None:
    """The row of CARDS that a GPU of `size` bytes is, by the driver's name for it (`NVIDIA A100-SXM4-80GB`); None if it
    is in none: an RTX 3080 Ti, or a notebook's RTX 4090, has other rates than the card whose name is in its own."""
    own, other = _plain(name), OTHERS & {*re.split("[^a-z0-9]+", name.lower())}
    found = [card for card in CARDS if _plain(re.sub("-[0-9]+gb$", "", card.name)) in own]
    near = [card for card in found if abs(card.bytes - size) < 0.1 * size]
    best = max(near, key=lambda card: len(card.name), default=None)
    return best if best is not None and all(word in best.name for word in other) else None


def sold_as(size: int) -> tuple[CardKind, ...]:
    """The rows of CARDS that are sold with `size` GB."""
    return tuple(card for card in CARDS if card.sold == size)


def like(text: str) -> list[str]:
    """Up to three names of CARDS that resemble an unknown name."""
    names = {_plain(card.name): card.name for card in CARDS}
    return [names[near] for near in difflib.get_close_matches(_plain(text), names, n=3, cutoff=0.6)]


def _plain(text: str) -> str:
    return re.sub("^(nvidia|geforce|tesla|rtx)+", "", re.sub("[^a-z0-9]", "", text.lower()))


def _table(rows: str) -> tuple[CardKind, ...]:
    cards = []
    for row in rows.strip().splitlines():
        name, sold, mib, capability, bandwidth, flops = row.split()
        major, minor = capability.split(".")
        rates = float(bandwidth) * 1e9, float(flops) * 1e12
        cards.append(CardKind(name, int(sold), int(mib) * 2**20, (int(major), int(minor)), *rates))
    return tuple(cards)


CARDS = _table("""
rtx2080ti       11  11264  7.5    616    54
t4              16  15360  7.5    320    65
rtx3060         12  12288  8.6    360    25
rtx3070          8   8192  8.6    448    41
rtx3080         10  10240  8.6    760    60
rtx3090         24  24576  8.6    936    71
rtx4060          8   8188  8.9    272    30
rtx4060ti       16  16380  8.9    288    44
rtx4070         12  12282  8.9    504    58
rtx4080         16  16376  8.9    717    97
rtx4090         24  24564  8.9   1008   165
rtx5070         12  12227 12.0    672    62
rtx5070ti       16  16303 12.0    896    88
rtx5080         16  16303 12.0    960   113
rtx5090         32  32607 12.0   1792   210
rtxa4000        16  16376  8.6    448    77
rtxa5000        24  24564  8.6    768   111
rtxa6000        48  49140  8.6    768   155
rtx6000ada      48  49140  8.9    960   364
rtxpro6000      96  97887 12.0   1792   504
a10             24  23028  8.6    600   125
a10g            24  23028  8.6    600    70
a40             48  46068  8.6    696   150
a100-40gb       40  40960  8.0   1555   312
a100-80gb       80  81920  8.0   2039   312
l4              24  23034  8.9    300   121
l40s            48  46068  8.9    864   362
h100            80  81559  9.0   3350   989
h100-pcie       80  81559  9.0   2000   756
h100-nvl        94  95830  9.0   3938   835
gh200           96  97871  9.0   4000   989
h200           141 143771  9.0   4800   989
b200           192 183359 10.0   8000  2250
""")


USABLE = 0.97  # share of a device's bytes; the driver, a display and other processes take the rest
# Parts that the learner keeps on the GPU while the engine is awake (layout alternating). It frees its allocator's
# cache, except segments that still hold a tensor, which are counted as `fragmentation`.
BETWEEN = ("weights", "adapters", "gradients", "optimizer", "reference", "fragmentation", "context")

Layout = Literal["separate", "slices", "alternating"]


@dataclass(frozen=True, slots=True)
class Workload:
    """The sizes of a run that the planner does not choose: lengths in tokens, and counts."""

    generations: int = 8  # completions per group
    prompt: int = 256  # the longest prompt
    completion: int = 256  # the longest completion
    sequences: int = 128  # decoded at the same time, at most
    adapters: int = 2  # policy versions that a generator holds
    generators: int = 1  # generators on one device
    shards: int = 1  # processes of a generator, each with a GPU
    learners: int = 1  # learner ranks on one device
    groups: int | None = None  # groups of an optimizer step; None if not known
    taught: int = 0  # the longest prompt that a teacher is given in place of the policy's; 0: it is given that one

    @property
    def read(self) -> int:
        """Tokens of the longest prompt that the learner reads."""
        return max(self.prompt, self.taught)

    @property
    def whole(self) -> int:
        """Tokens of one completion with its prompt."""
        return self.prompt + self.completion

    @property
    def longest(self) -> int:
        """Tokens of one completion with its prompt in a micro-batch, which leaves out the last token."""
        return self.read + self.completion - 1

    @property
    def group(self) -> int:
        """Tokens of a packed group."""
        return self.read + self.generations * (self.completion - 1)

    @property
    def most(self) -> float:
        """Tokens of an optimizer step, which no micro-batch exceeds."""
        return float("inf") if self.groups is None else self.groups * self.group


@dataclass(frozen=True, slots=True)
class Wish:
    """The settings of a run that its memory depends on. The planner chooses those that are None; comments name the key
    of the configuration where the name differs."""

    mode: Literal["lora", "full"] = "lora"
    push: Literal["adapter", "merged"] = "adapter"
    rank: int = 16
    targets: tuple[str, ...] = ALL
    dtype: str = "bfloat16"
    optimizer: OptimizerKind = "adamw"
    frozen_ranks: tuple[int, ...] = ()
    value_rank: int = 0
    reference: ReferenceKind = "none"
    top: int = 0  # learner.loss.teacher_top
    offload: bool = False
    base: Base | None = None
    checkpointing: Checkpointing | None = None
    token_budget: int | None = None
    kv_bytes: int | None = None
    kv_dtype: str = "bfloat16"  # of the KV cache; or fp8
    layouts: tuple[Layout, ...] = ("slices", "alternating")
    exact: bool = False  # learner.reduce: exact
    undo: bool = False  # the learner has several ranks, each of which can undo its step
    shared: bool = False  # memory.layout: shared, where the learner uses the generator's base
    base_ranks: int = 1  # ranks over which the learner's base is divided (memory.layout: sharded)
    runs: int = 1  # that share the processes, each with an adapter of its own (gleaner sweep)
    cuda: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """One choice of settings, and the bytes that it takes, by part and role."""

    shape: Shape
    device_bytes: int
    layout: Layout
    base: Base
    checkpointing: Checkpointing
    token_budget: int
    kv_bytes: int
    sequences: int  # sequences of full length that the KV cache holds at the same time
    learner: Parts  # of one learner rank
    generator: Parts  # of one generator; with shards, of one of its GPUs
    generators: int = 1  # on one device
    learners: int = 1  # learner ranks on one device
    shards: int = 1  # GPUs of a generator, over which kv_bytes are spread

    @property
    def learner_bytes(self) -> int:
        return units.total(self.learner)

    @property
    def generator_bytes(self) -> int:
        return units.total(self.generator)

    @property
    def generator_room(self) -> int:
        """Bytes that one generator may grow to: those of its plan, or in layout slices all that the learners leave."""
        left = USABLE * self.device_bytes - self.learners * self.learner_bytes if self.layout == "slices" else 0
        return max(self.generator_bytes, int(left / self.generators))

    @property
    def device_peak(self) -> int:
        """The peak of the bytes that are in use on one device."""
        learner, generator = self.learners * self.learner_bytes, self.generators * self.generator_bytes
        if self.layout == "separate":
            return max(learner, generator)
        if self.layout == "slices":
            return learner + generator
        between = sum(self.learner[name] for name in BETWEEN)
        return max(between + generator, learner + self.generators * units.total(asleep(self.generator)))


@dataclass(frozen=True, slots=True)
class Misfit:
    """The planner's answer if no choice fits. advice: single changes that would make it fit, the mildest first."""

    shape: Shape
    device_bytes: int
    least: Plan  # the choice that needs the smallest device
    advice: tuple[str, ...]

    @property
    def needs(self) -> int:
        """Bytes that a device must have for `least`."""
        return round(self.least.device_peak / USABLE)

    def __str__(self) -> str:
        return (
            f"memory.device: {self.shape.name} needs {gib(self.needs)} with the least of settings, "
            f"{gib(self.device_bytes)} are there. Change one of: {'; '.join(self.advice)}"
        )


def gib(count: float) -> str:
    """A number of bytes as text for users, in GiB or MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


# Main memory of a run on GPUs. (On a CPU the plan itself is about main memory.)

# Resident sets in the middle of a run on two cores (configs/local_cpu.yaml, Linux, Ray 2.60), with shared pages: the
# driver; all of Ray's own processes; one reward process.
DRIVER, RAY, REWARD = 330 * 10**6, 360 * 10**6, 150 * 10**6
ENVIRONMENT_SERVER, ENVIRONMENT = 290 * 10**6, 11 * 10**6  # the fork server; pages that each forked process writes
CUDA_LIBRARIES = 1500 * 10**6  # per process on a GPU, without torch: cuBLAS, kernels, pinned buffers (estimate)


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
    """Bytes of main memory, by part, on one machine that runs the whole plan.

    Arguments. object_store: the limit of Ray's object store. learners: ranks of the learner. reward_processes: all of
      them. reward_models: bytes of the weights that each reward process loads for `use: sequence_classifier`.
      environments: the most that run at the same time beside one generator.
    driver, ray, rewards: measured. A user's function that loads a model takes its size on top, up to
      rollout.process_memory; a reward process with `reward_models` holds torch too.
    environments: measured with tools in Python; what an environment loads comes on top, up to rollout.process_memory.
    learner, generators: their processes without a model, measured on a CPU, and CUDA's libraries (estimate).
    object_store: in /dev/shm. asleep: weights and adapters of generators in vLLM's sleep level 1, pinned.
    offloaded: inputs of layers, with learner.checkpointing=offloaded. undo: the state that each rank had before its
      step, with several ranks. paged: the states of paged_adamw_8bit, once the GPU is full. policy: pushed whole
      weights, where the generators read them (if the weights come through the object store: where the processes of a
      generator with shards do).
    passing: the largest of what is held for a while: the learner's weights while they are loaded (4 bits and shards
      matrix by matrix), the copies of a push of whole weights, or a part of a whole model's checkpoint. vLLM maps the
      model's files, whose pages the kernel can free, so they are not counted.
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
    """Main memory that one learner rank takes while it loads its weights."""
    shape, b = found.shape, DTYPE_BYTES[wish.dtype]
    if wish.shared:
        return 0
    return b * shape.params if found.base == "none" and wish.base_ranks == 1 else b * shape.vocab * shape.hidden


def _saving(found: Plan, wish: Wish, learners: int) -> int:
    """Main memory that a checkpoint of a whole model takes while it is written: the largest matrix in float32; in
    shards the tensors of one file and their bytes, for each rank."""
    if wish.base_ranks > 1:
        return learners * 2 * min(FILE_BYTES, 12 * divided_params(found.shape, wish.base_ranks))
    return 4 * found.shape.vocab * found.shape.hidden


def _undo(shape: Shape, wish: Wish) -> int:
    """Main memory in which one rank keeps the state before its step, of its adapter and of PPO's value."""
    value = sum(value_params(shape, wish.value_rank, wish.targets))
    return undo_bytes(shape.lora_params(wish.rank, wish.targets) + value, wish.optimizer)
