"""What a learner holds between two steps, in bytes, by part. Letters: as in cluster.memory.learner."""

from cluster.memory.learning import Learning, ReferenceKind
from cluster.memory.shape import LINEAR, Shape
from cluster.memory.sharded import divided_params, sharded_base_bytes, sharded_training_bytes
from cluster.memory.units import DTYPE_BYTES, STATE_BYTES, OptimizerKind, Parts, base_bytes


def learner_static(shape: Shape, learning: Learning) -> Parts:
    """What is alive between two steps.

    weights: b per parameter; nf4 as in cluster.memory.units.
    adapters: LoRA, b n that the model computes with and 4 n float32 masters (one and the same in float32), and b for
      each weight of a frozen adapter, on the same targets. Full fine-tuning: 4 n masters with adamw; the other
      optimizers round (see learner.trainer.optimizer). PPO's value: the same again of its own n and of a
      float32 head of h.
      In shards (memory.base: sharded) 4 n masters, n being this rank's (cluster.memory.sharded).
    gradients: 4 n, of the masters; b n without masters. Exact sums (learner.trainer.gradient_sums) take another 16 n.
    optimizer: AdamW two float32 states, 8 n; in 8 bits (2110.02861) 2 n and a float32 scale per 256. Paged states lie
      in host memory when the device is full.
    reference: of full fine-tuning with beta > 0 (learner.model.reference, in shards
      learner.model.reference).
    undo: on a CPU (see undo_bytes).
    """
    b = DTYPE_BYTES[learning.dtype]
    n = trained_params(shape, learning)
    head, value = value_params(shape, learning.value_rank, learning.targets)
    masters = learning.mode == "lora" or learning.optimizer == "adamw" or learning.ranks > 1
    divided = learning.mode == "full" and learning.ranks > 1
    adapters = (4 if divided or (b < 4 and masters) else 0) * n
    if learning.mode == "lora":
        adapters += b * (n + sum(shape.lora_params(rank, learning.targets) for rank in learning.frozen_ranks))
        adapters += (b + (4 if b < 4 else 0)) * value + 4 * head
    n += value + head
    scales = n // 32 if learning.optimizer == "adamw_8bit" else 0
    return {
        **_base(shape, learning, b),
        "adapters": adapters,
        "gradients": ((4 if masters else b) + (16 if learning.exact else 0)) * n,
        "optimizer": STATE_BYTES[learning.optimizer] * n + scales,
        "reference": reference_bytes(shape, learning.reference, b, learning.ranks),
        **({"undo": undo_bytes(n, learning.optimizer)} if learning.undo and not learning.cuda else {}),
    }


def _base(shape: Shape, learning: Learning, b: int) -> Parts:
    if learning.ranks == 1:
        return {"weights": base_bytes(shape, learning.base, b)}
    if learning.mode == "lora":
        return sharded_base_bytes(shape, b, learning.ranks)
    return sharded_training_bytes(shape, b)


def undo_bytes(n: int, optimizer: OptimizerKind) -> int:
    """Of main memory: masters and states of n weights as they were when a step began (learner.ranks.rank)."""
    return (4 + STATE_BYTES[optimizer]) * n


def value_params(shape: Shape, rank: int, targets: tuple[str, ...]) -> tuple[int, int]:
    """Weights of the head and of the adapter of PPO's value; rank 0: there is none."""
    return (shape.hidden if rank else 0), shape.lora_params(rank, targets)


def trained_params(shape: Shape, learning: Learning) -> int:
    """n: weights of the adapter, or of the model, those that this rank has."""
    if learning.mode == "lora":
        return shape.lora_params(learning.rank, learning.targets)
    return divided_params(shape, learning.ranks)


def reference_bytes(shape: Shape, kind: ReferenceKind, b: int, ranks: int) -> int:
    """b per parameter that this rank has: a pass gathers less than one that trains (cluster.memory.sharded).

    int8, of one rank: a byte for each linear weight of the layers, and b for the scale of each of their rows; one
    matrix at a time is multiplied out, in a pass that keeps nothing else, which is far below the step's peak.
    """
    if kind == "none":
        return 0
    if kind == "auto":
        return b * divided_params(shape, ranks)
    rows = shape.layers * sum(out for _, out in map(shape.linear, LINEAR))
    return b * (shape.params - shape.linear_params) + shape.linear_params + b * rows
