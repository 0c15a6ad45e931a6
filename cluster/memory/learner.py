"""The memory model of the learner: what it holds, in bytes, by part. Pure functions of a shape and settings. What a
generator holds is in cluster.memory.generator.

Letters: L layers; n adapter weights; b bytes per element of the base's type; N tokens of the largest micro-batch, h
hidden, V vocabulary.

What torch keeps between two steps follows from types and counts. What a step takes on top is a sum of what each layer
keeps and a maximum over the places where it can be highest; cluster.memory.terms lists what they are made of.
"""

from collections.abc import Mapping, Sequence

from cluster.memory import terms
from cluster.memory.between_steps import learner_static
from cluster.memory.learning import Learning, Micro
from cluster.memory.shape import LINEAR, Shape
from cluster.memory.terms import Term
from cluster.memory.units import CONTEXT, DTYPE_BYTES, Parts
from cluster.memory.weight_push import learner_copies, merging_bytes, pushed_bytes

FRAGMENTATION = 0.04  # of what a step takes: blocks that the caching allocator cannot join; 3 to 10 % is usual
# On a CPU a role is a process, its memory the resident set. Measured on Linux (two cores, torch 2.13, vLLM 0.32) with
# the models of examples/: what there is before a model; what first use adds; and what malloc keeps of a step.
LEARNER_PROCESS, LEARNER_WORKSPACE, MALLOC = 530 * 10**6, 85 * 10**6, 0.35

WIDENED_ROWS = 1024  # learner.model.lora.TILE, which the driver cannot import: it loads no torch


def learner_bytes(shape: Shape, learning: Learning, micro: Micro) -> Parts:
    """What the learner holds at its highest, by part; their sum is what the device must have for it."""
    static, step = learner_static(shape, learning), step_bytes(shape, learning, micro)
    lost = round((FRAGMENTATION if learning.cuda else MALLOC) * sum(step.values()))
    sent = pushed_bytes(shape, learning.mode, learning.push, learning.targets, DTYPE_BYTES[learning.dtype])
    host = {} if learning.cuda else {"push": learner_copies(undo=learning.undo) * sent, "workspace": LEARNER_WORKSPACE}
    return static | step | {"fragmentation": lost, **host, "context": learner_context(cuda=learning.cuda)}


def learner_context(*, cuda: bool) -> int:
    """What the learner's process has before it holds a tensor. It is no part of memory.learner: the limit counts
    tensors on CUDA, and on a CPU the growth from there on (learner.trainer.memory_limit)."""
    return CONTEXT if cuda else LEARNER_PROCESS


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
    if learning.ranks > 1:
        return 0  # each layer's gradients are summed and divided at once
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
        segments=learning.segments,
    )


def _dequantised(shape: Shape, learning: Learning) -> int:
    """The largest matrix of a layer, multiplied out for its product, with its scales in float32."""
    if learning.base == "none":
        return 0
    largest = max(i * o for i, o in map(shape.linear, LINEAR))
    return largest * DTYPE_BYTES[learning.dtype] + largest // 16


def _widened(shape: Shape, learning: Learning) -> int:
    """The largest matrix of a layer in float32, and the rows that it multiplies, as a CPU without instructions for 16
    bits needs them (learner.model.lora); one with them needs less."""
    if learning.cuda or learning.base == "nf4" or learning.mode == "full" or learning.dtype == "float32":
        return 0
    largest = max(i * o for i, o in map(shape.linear, LINEAR))
    return 4 * largest + 4 * WIDENED_ROWS * (shape.hidden + shape.ffn)


def mlp_share(shape: Shape) -> float:
    """The feed-forward block's part of the weights, hence of the work, of a layer."""
    work: Sequence[int] = [i * o for i, o in map(shape.linear, LINEAR)]
    return sum(work[4:]) / sum(work)
