"""The memory model of the learner: what it holds, in bytes, by part. Pure functions of a shape and settings. What a
generator holds is in cluster.memory.generator.

Letters: L layers; n adapter weights; b bytes per element of the base's type; N tokens of the largest micro-batch, h
hidden, V vocabulary.

What torch keeps between two steps follows from types and counts. What a step takes on top is a sum of what each layer
keeps and a maximum over the places where it can be highest; cluster.memory.terms lists what they are made of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.memory import terms
from cluster.memory.shape import LINEAR, Shape
from cluster.memory.terms import Term
from cluster.memory.units import CONTEXT, DTYPE_BYTES, STATE_BYTES, Checkpointing, OptimizerKind, Parts, base_bytes
from cluster.memory.weight_push import LEARNER_COPIES, merging_bytes, pushed_bytes

FRAGMENTATION = 0.04  # of what a step takes: blocks that the caching allocator cannot join; 3 to 10 % is usual
# On a CPU a role is a process, its memory the resident set. Measured on Linux (two cores, torch 2.13, vLLM 0.32) with
# the models of examples/: what there is before a model; what first use adds; and what malloc keeps of a step.
LEARNER_PROCESS, LEARNER_WORKSPACE, MALLOC = 530 * 10**6, 85 * 10**6, 0.35

WIDENED_ROWS = 1024  # learner.model.widened_lora.TILE, which the driver cannot import: it loads no torch

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
    fused: bool = True  # norms and MLPs as operations of learner.model.fusion, which other learners have not

    def keeps_floats(self, shape: Shape) -> bool:
        """Whether norms keep float32 copies of their inputs: transformers' own do, and Gemma's are never fused."""
        return shape.gemma or not self.fused

    def keeps_gates(self, shape: Shape) -> bool:
        """Whether MLPs keep their gate's activation: all but the SwiGLU of a card."""
        return self.keeps_floats(shape) or shape.activation != "silu" or not self.cuda


def learner_bytes(shape: Shape, learning: Learning, micro: Micro) -> Parts:
    """What the learner holds at its highest, by part; their sum is what the device must have for it."""
    static, step = learner_static(shape, learning), step_bytes(shape, learning, micro)
    lost = round((FRAGMENTATION if learning.cuda else MALLOC) * sum(step.values()))
    sent = pushed_bytes(shape, learning.mode, learning.push, learning.targets, DTYPE_BYTES[learning.dtype])
    host = {} if learning.cuda else {"push": LEARNER_COPIES * sent, "workspace": LEARNER_WORKSPACE}
    return static | step | {"fragmentation": lost, **host, "context": learner_context(cuda=learning.cuda)}


def learner_context(*, cuda: bool) -> int:
    """What the learner's process has before it holds a tensor. It is no part of memory.learner: the limit counts
    tensors on CUDA, and on a CPU the growth from there on (learner.trainer.memory_limit)."""
    return CONTEXT if cuda else LEARNER_PROCESS


def learner_static(shape: Shape, learning: Learning) -> Parts:
    """What is alive between two steps.

    weights: b per parameter; nf4 as in cluster.memory.units.
    adapters: LoRA, b n that the model computes with and 4 n float32 masters (one and the same in float32), and b for
      each weight of a frozen adapter, on the same targets. Full fine-tuning: 4 n masters with adamw; the other
      optimizers round (see learner.trainer.stochastic_rounding). PPO's value: the same again of its own n and of a
      float32 head of h.
    gradients: 4 n, of the masters; b n without masters. Exact sums (learner.trainer.gradient_sums) take another 16 n.
    optimizer: AdamW two float32 states, 8 n; in 8 bits (2110.02861) 2 n and a float32 scale per 256. Paged states lie
      in host memory when the device is full.
    reference: of full fine-tuning with beta > 0 (learner.model.reference).
    undo: on a CPU (see undo_bytes).
    """
    b = DTYPE_BYTES[learning.dtype]
    n = trained_params(shape, learning)
    head = shape.hidden if learning.value_rank else 0
    value = shape.lora_params(learning.value_rank, learning.targets)
    masters = learning.mode == "lora" or learning.optimizer == "adamw"
    adapters = (4 if b < 4 and masters else 0) * n
    if learning.mode == "lora":
        adapters += b * (n + sum(shape.lora_params(rank, learning.targets) for rank in learning.frozen_ranks))
        adapters += (b + (4 if b < 4 else 0)) * value + 4 * head
    n += value + head
    scales = n // 32 if learning.optimizer == "adamw_8bit" else 0
    return {
        "weights": base_bytes(shape, learning.base, b),
        "adapters": adapters,
        "gradients": ((4 if masters else b) + (16 if learning.exact else 0)) * n,
        "optimizer": STATE_BYTES[learning.optimizer] * n + scales,
        "reference": reference_bytes(shape, learning.reference, b),
        **({"undo": undo_bytes(shape, learning)} if learning.undo and not learning.cuda else {}),
    }


def undo_bytes(shape: Shape, learning: Learning) -> int:
    """Of main memory: masters and states as they were when a step began (learner.ranks.memory)."""
    return (4 + STATE_BYTES[learning.optimizer]) * trained_params(shape, learning)


def trained_params(shape: Shape, learning: Learning) -> int:
    """n: weights of the adapter, or of the model."""
    return shape.params if learning.mode == "full" else shape.lora_params(learning.rank, learning.targets)


def reference_bytes(shape: Shape, kind: ReferenceKind, b: int) -> int:
    """b per parameter. int8: a byte for each linear weight of the layers, and b for the scale of each of their rows;
    one matrix at a time is multiplied out, in a pass that keeps nothing else, which is far below the step's peak."""
    if kind == "none":
        return 0
    if kind == "auto":
        return b * shape.params
    rows = shape.layers * sum(out for _, out in map(shape.linear, LINEAR))
    return b * (shape.params - shape.linear_params) + shape.linear_params + b * rows


def step_bytes(shape: Shape, learning: Learning, micro: Micro) -> Parts:
    """What a step takes on top: `checkpoints` (inputs of layers that are computed twice), `activations` (what the other
    layers keep) and `live` (the most that one place takes beside them, the tile of the head or the layer at work).

    The peak lies in the last layers, where the backward pass begins; with checkpointing=k possibly in layer k, too.
    `update`: what comes beyond that when the activations are gone. With float32 masters of a 16-bit model, all of this
    micro-batch's gradients, b n, at the end of the backward pass; fused AdamW takes nothing. Without masters, 6 bytes
    per weight of the largest matrix: it and the random bits in float32's size, less its gradient. Where a push is
    merged, that matrix in float32.
    """
    kept_attention, kept_mlp = kept_per_layer(shape, learning, micro)
    layer = kept_attention + kept_mlp
    boundary = DTYPE_BYTES[learning.dtype] * shape.hidden * micro.tokens
    norm = boundary * (2 if learning.keeps_floats(shape) else 1)  # its input, in float32 if it is not fused
    again, kept = live_again(shape, learning, micro), live_kept(shape, learning, micro)
    policy, layers = learning.checkpointing, shape.layers
    if policy == "none":
        parts = {"checkpoints": 0, "activations": layers * layer, "live": kept}
    elif policy == "mlp":
        parts = {"checkpoints": 0, "activations": layers * kept_attention, "live": max(again[1], kept)}
    elif policy == "full":
        held = 0 if learning.offload else layers * boundary
        # Beside the head lies what the last norm keeps.
        parts = {"checkpoints": held, "activations": 0, "live": max(again[0], kept + norm)}
    else:
        first = min(policy, layers)
        # Nothing in front of the first layer wants a gradient, so it keeps less; here it is not among the kept.
        activations = (layers - first) * layer + norm if first < layers else 0
        end = activations + (kept if first < layers else 0)
        live = max(end, again[0], head_bytes(shape, learning, micro)) - activations
        parts = {"checkpoints": first * boundary, "activations": activations, "live": live}
    if learning.mode == "full":  # the head's gradient, the first that there is
        parts["live"] += DTYPE_BYTES[learning.dtype] * shape.vocab * shape.hidden
    return parts | {"update": max(0, _update_bytes(shape, learning) - sum(parts.values()))}


def _update_bytes(shape: Shape, learning: Learning) -> int:
    if learning.mode == "lora":
        return merging_bytes(shape) if learning.push == "merged" else 0
    if learning.optimizer == "adamw":
        return 0 if learning.dtype == "float32" else DTYPE_BYTES[learning.dtype] * shape.params
    return 6 * shape.vocab * shape.hidden


def kept_per_layer(shape: Shape, learning: Learning, micro: Micro) -> tuple[int, int]:
    """(attention and norms, feed-forward) that a layer keeps for its backward pass."""
    attention, mlp = _sums(shape, learning, micro, terms.KEPT_ATTENTION, terms.KEPT_MLP)
    return attention, mlp


def live_again(shape: Shape, learning: Learning, micro: Micro) -> tuple[int, int]:
    """The most that is held while one layer is computed a second time for its backward pass; and the same where only
    its MLP is (checkpointing=mlp).

    A 4-bit base: its largest matrix is multiplied out for one product of the feed-forward block's backward pass. Where
    the block is not fused, 2 N f of its gradients do not exist yet at that moment, so only what the matrix takes beyond
    them is added.
    """
    kept_attention, kept_mlp = kept_per_layer(shape, learning, micro)
    mlp, norm, alone, attention = _sums(
        shape, learning, micro, terms.AGAIN_MLP, terms.AGAIN_LAST_NORM, terms.AGAIN_MLP_ALONE, terms.AGAIN_ATTENTION
    )
    not_yet = DTYPE_BYTES[learning.dtype] * micro.tokens * shape.ffn if learning.keeps_gates(shape) else 0
    extra = max(0, _dequantised(shape, learning) - not_yet) + _widened(shape, learning)
    layer = kept_attention + max(kept_mlp + max(mlp, norm) + extra, attention)
    return layer, max(kept_mlp + alone + extra, attention)


def live_kept(shape: Shape, learning: Learning, micro: Micro) -> int:
    """The most that is held beside what all layers keep: the head's tile, the backward pass of the last norm, or that
    of the last layer, which takes little more than it frees."""
    _, alone = live_again(shape, learning, micro)
    _, kept_mlp = kept_per_layer(shape, learning, micro)
    (norm,) = _sums(shape, learning, micro, terms.LAST_NORM)
    return max(head_bytes(shape, learning, micro), norm, alone - kept_mlp)


def head_bytes(shape: Shape, learning: Learning, micro: Micro) -> int:
    """learner.model.logprob: one tile of logits, independent of V, and what grows with the tokens."""
    (head,) = _sums(shape, learning, micro, terms.HEAD)
    tile = terms.HEAD_TILE_ON_CARD if learning.cuda else terms.HEAD_TILE
    trained = terms.HEAD_TRAINED * shape.hidden if learning.mode == "full" else 0
    return terms.bytes_of(tile, _letters(shape, learning, micro)) + head + trained


def _sums(shape: Shape, learning: Learning, micro: Micro, *tables: Sequence[Term]) -> list[int]:
    """The bytes of each table of cluster.memory.terms in the base's type."""
    values = _letters(shape, learning, micro)
    return [DTYPE_BYTES[learning.dtype] // 2 * terms.bytes_of(table, values) for table in tables]


def _letters(shape: Shape, learning: Learning, micro: Micro) -> Mapping[str, float]:
    rows = terms.HEAD_ROWS_ON_CARD if learning.cuda else terms.HEAD_ROWS
    return terms.letters(
        shape,
        tokens=micro.tokens,
        completion=micro.completion,
        keys=micro.keys,
        rows=min(rows, micro.completion),
        lora_rank=max(learning.rank, learning.value_rank) * len(learning.targets),
        full=learning.mode == "full",
        keeps_floats=learning.keeps_floats(shape),
        keeps_gates=learning.keeps_gates(shape),
    )


def _dequantised(shape: Shape, learning: Learning) -> int:
    """The largest matrix of a layer, multiplied out for its product, with its scales in float32."""
    if learning.base == "none":
        return 0
    largest = max(i * o for i, o in map(shape.linear, LINEAR))
    return largest * DTYPE_BYTES[learning.dtype] + largest // 16


def _widened(shape: Shape, learning: Learning) -> int:
    """The largest matrix of a layer in float32, and the rows that it multiplies, as a CPU without instructions for 16
    bits needs them (learner.model.widened_lora); one with them needs less."""
    if learning.cuda or learning.base == "nf4" or learning.mode == "full" or learning.dtype == "float32":
        return 0
    largest = max(i * o for i, o in map(shape.linear, LINEAR))
    return 4 * largest + 4 * WIDENED_ROWS * (shape.hidden + shape.ffn)


def mlp_share(shape: Shape) -> float:
    """The feed-forward block's part of the weights, hence of the work, of a layer."""
    work: Sequence[int] = [i * o for i, o in map(shape.linear, LINEAR)]
    return sum(work[4:]) / sum(work)
