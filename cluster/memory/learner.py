"""The memory model of the learner: what it holds, in bytes, by part. Pure functions of a shape and settings. What a
generator holds is in cluster.memory.generator.

Letters: L layers; n adapter weights; b bytes per element of the base's type; N tokens of the largest micro-batch, h
hidden, V vocabulary.

What torch keeps between two steps follows from types and counts. What a step takes on top is a sum of what each layer
keeps and a maximum over the places where it can be highest; the functions below list what they are made of.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from cluster.memory.shape import (
    CONTEXT,
    DTYPE_BYTES,
    LINEAR,
    STATE_BYTES,
    Checkpointing,
    OptimizerKind,
    Parts,
    Shape,
    base_bytes,
)

# How a learner trains, and on what, as far as it matters for memory.

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
    ranks: int = 1  # over which the base is divided (memory.layout: sharded)
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


# The memory model of a learner's base that is divided among its ranks (memory.layout: sharded). Pure functions.

LAYERS = 3  # that are whole at once: the one at work, the next, gathered meanwhile, and the buffer that it arrives in
FILE_BYTES = 2**30  # of this rank's rows that a checkpoint of a whole model writes at once


def divided_params(shape: Shape, ranks: int) -> int:
    """Weights that one rank has: its rows of all matrices, and a tied embedding, which stays whole."""
    return _whole(shape) + -(-(shape.params - _whole(shape)) // ranks)


def sharded_base_bytes(shape: Shape, b: int, ranks: int) -> Parts:
    """Of one rank, of a base that is frozen; b: bytes per element.

    gathered: the most that is whole for a while, of layers, or an embedding and the buffer that it arrives in.
    """
    embedding = b * shape.vocab * shape.hidden
    return {
        "weights": b * divided_params(shape, ranks),
        "gathered": max(LAYERS * b * _layer(shape), 2 * (embedding - b * _whole(shape))),
    }


def sharded_training_bytes(shape: Shape, b: int) -> Parts:
    """Of one rank, of a base that is trained, beside float32 masters, gradients and states of divided_params.

    weights: the copy in model.dtype of a tied embedding; that of all others is gathered. gathered: as above, and of
    what is behind it in the backward pass, twice, the gradient in model.dtype and in float32, which the ranks sum. That
    of a head apart stays in float32 to the end of the pass.
    """
    embedding = shape.vocab * shape.hidden
    apart = 0 if shape.tied else embedding
    return {
        "weights": b * _whole(shape) if b < 4 else 0,
        "gathered": max((LAYERS * b + 2 * (b + 4)) * _layer(shape) + 4 * apart, (2 * b + b + 4) * apart),
    }


def _whole(shape: Shape) -> int:
    return shape.vocab * shape.hidden if shape.tied else 0


def _layer(shape: Shape) -> int:
    embeddings = (1 if shape.tied else 2) * shape.vocab * shape.hidden
    return (shape.params - embeddings) // shape.layers


# What a push of whole weights takes (learner.push: merged; learner.mode: full), in bytes. Pure functions.
#
# What travels is host memory: on CUDA no plan of a card counts it, on a CPU it is of the memory that both roles have.
# An adapter's own bytes are not counted.

BLOCKS = (
    tuple(LINEAR)[:4],
    tuple(LINEAR)[4:],
)  # attention, feed-forward: a block is sent whole (learner.model.policy)
# On a CPU, as multiples of what is sent, by the growth of the resident sets (python -m benchmarks whole_push). Learner:
# the file that generators read, with room for two policies, of which it maps one (1.0); through the object store its
# own bytes and the store's pages of this push and of the one before, which is still held (3.4 with 75 MB). Generator
# (1.4 and 1.9): its view, and vLLM's copies of the layer that it is loading.
FILE_COPIES, STORE_COPIES, GENERATOR_COPIES = 2, 3, 2
# Of a generator of several processes: the view of the one that asks them, which hashes the weights (estimate). Where
# they come through the object store it is a copy, in which the others find them (rollout.vllm.policies).
SHARDS_COPIES = 1


def pushed_bytes(shape: Shape, mode: str, push: str, targets: tuple[str, ...], b: int) -> int:
    """The whole model; or the linear weights of the blocks that the adapter touches; 0 for an adapter. b: bytes of an
    element."""
    if mode == "full":
        return b * shape.params
    if push == "adapter":
        return 0
    sent = [name for block in BLOCKS if set(block) & set(targets) for name in block]
    return b * shape.layers * sum(i * o for i, o in map(shape.linear, sent))


def learner_copies(*, undo: bool) -> int:
    """Of several ranks that are replaced one by one, what one has sent must outlive it: it goes to the object store."""
    return STORE_COPIES if undo else FILE_COPIES


def merging_bytes(shape: Shape) -> int:
    """One matrix at a time is float32 where it lies, before it is rounded and travels."""
    return 4 * max(i * o for i, o in map(shape.linear, LINEAR))


# What a learner holds between two steps, in bytes, by part.


def learner_static(shape: Shape, learning: Learning) -> Parts:
    """What is alive between two steps.

    weights: b per parameter; nf4 as in cluster.memory.shape.
    adapters: LoRA, b n that the model computes with and 4 n float32 masters (one and the same in float32), and b for
      each weight of a frozen adapter, on the same targets. Full fine-tuning: 4 n masters with adamw; the other
      optimizers round (see learner.trainer.optimizer). PPO's value: the same again of its own n and of a
      float32 head of h.
      In shards (memory.layout: sharded) 4 n masters, n being this rank's.
    gradients: 4 n, of the masters; b n without masters. Exact sums (learner.trainer.optimizer) take another 16 n.
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
    """b per parameter that this rank has: a pass gathers less than one that trains.

    int8, of one rank: a byte for each linear weight of the layers, and b for the scale of each of their rows; one
    matrix at a time is multiplied out, in a pass that keeps nothing else, which is far below the step's peak.
    """
    if kind == "none":
        return 0
    if kind == "auto":
        return b * divided_params(shape, ranks)
    rows = shape.layers * sum(out for _, out in map(shape.linear, LINEAR))
    return b * (shape.params - shape.linear_params) + shape.linear_params + b * rows


# What a step of the learner holds, term by term: how many bytes, of what, and which tensors they are.
#
# A unit is a product of letters. N tokens of the largest micro-batch, C of them completion tokens, R of these in a tile
# of the head, S keys that its completions attend to (a shared prompt once per completion); h hidden, f feed-forward, q
# all query heads, k all key heads (or value heads), in elements; rank: of the adapter, times its targets. Letters that
# stand for a kind of model or of training are 0 or 1, unless a comment says otherwise.
#
# Bytes are those of a base in 16 bits; in float32 all but the head's tile count twice, which is an upper bound.
# Sources: what autograd saves, read from the operations; `measured` from learner.tools.meta_run, the real step on
# tensors without content, to which tests/cluster/memory/test_learner.py holds the sums within 2 % of the peak.


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes of a unit, and what they are."""

    bytes: float
    unit: str
    source: str


# What one layer keeps for its backward pass.
KEPT_ATTENTION = (
    Term(4, "N h", "inputs of its two norms"),
    Term(4, "N h", "what the norms give and the adapters read"),
    Term(4, "N h keeps_floats", "float32 copies of the norms' inputs, in place of those in 16 bits"),
    Term(4, "N h further_norms", "the same of Gemma's further norms"),
    Term(4, "N q", "queries and attention's output"),
    Term(4, "N heads", "logsumexp of attention, float32"),
    Term(4, "S k", "keys and values, gathered with the prompt's"),
    Term(4, "S q repeated", "in their place the same once for each query head, where attention is not FlashAttention"),
    Term(-4, "S k repeated", "as above"),
    Term(4, "N k segments", "keys and values before they are gathered, there"),
    Term(1.7, "N q segments", "attention's output of each segment, there; measured"),
    Term(2, "N rank lora", "what each adapter's first matrix gives"),
    Term(2, "N q head_norms", "inputs of the norms of queries"),
    Term(2, "N k head_norms", "the same of keys"),
    Term(2, "N q head_norms keeps_floats", "float32 copies of them, in place of those in 16 bits"),
    Term(2, "N k head_norms keeps_floats", "the same of keys"),
    Term(4, "N heads head_norms", "one factor per head of a norm of queries, float32"),
    Term(4, "N kv_heads head_norms", "the same of keys"),
    Term(2, "N normed full keeps_floats", "what the weight of a norm that trains multiplies"),
    Term(2, "N normed full gemma", "Gemma multiplies it in float32"),
)
KEPT_MLP = (
    Term(6, "N f", "gate, up, and their product"),
    Term(2, "N f keeps_gates", "the gate's activation, where it is no operation of a card"),
)

# What the backward pass of a block takes beside what its layer keeps, where the whole layer was computed twice.
AGAIN_MLP = (
    Term(2, "N f", "gradient of the product; those of gate and up take their place"),
    Term(2, "N f keeps_gates", "gradients of gate and up, less what is freed; measured"),
    Term(2, "N h keeps_floats", "measured"),
    Term(250, "N", "measured"),
    Term(-3, "N h gemma", "what is freed before; measured"),
)
AGAIN_LAST_NORM = (  # at least, where a norm follows the block
    Term(22, "N h gemma", "float32 temporaries of the backward pass of that norm; measured"),
    Term(1100, "N gemma", "measured"),
)
AGAIN_ATTENTION = (
    Term(8, "N q", "gradients of queries and output, and FlashAttention's float32 gradient of the queries"),
    Term(-4, "N h", "what is freed before; measured"),
    Term(-8, "N h gemma", "what is freed before of its further norms; measured"),
    Term(4, "S k", "gradients of the gathered keys and values"),
    Term(4, "S q grouped", "FlashAttention expands keys and values to one per query head (mha_varlen_bwd)"),
)
# The same where only the MLP is computed twice.
AGAIN_MLP_ALONE = (
    Term(2, "N f", "as above"),
    Term(2, "N f keeps_gates", "as above"),
    Term(-1.85, "N h keeps_floats", "what is freed before; measured"),
    Term(-3.45, "N h gemma", "what is freed before of its further norms; measured"),
)

# The top of the model.
LAST_NORM = (
    Term(4, "N h", "what the last norm keeps, and the gradient of its input"),
    Term(16, "N h keeps_floats", "float32 temporaries of its backward pass; measured"),
)
HEAD = (
    Term(0.5, "N h", "measured"),
    Term(4, "C h", "a completion token's state, and its Jacobian"),
)
# learner.model.logprob: a tile of R completion tokens and 8192 words, in the same bytes whatever the base's type.
HEAD_ROWS, HEAD_ROWS_ON_CARD = 512, 2048
HEAD_TILE_ON_CARD = (
    Term(6 * 8192, "R", "logits in float32, and their weights in 16 bits"),
    Term(8, "R h", "the weighted sum of the head's rows, and what this tile adds to it, float32"),
)
HEAD_TILE = (
    *HEAD_TILE_ON_CARD,
    Term(4 * 8192, "R", "the weights in float32 again: no product of a CPU takes 16 bits and gives 32"),
    Term(4 * 8192, "h", "the head's rows in float32, for the same reason"),
)
HEAD_TRAINED = 8 * 8192  # times h: one tile of the head's gradient in float32, and what a tile of tokens adds to it


def letters(
    shape: Shape,
    *,
    tokens: int,
    completion: int,
    keys: int,
    rows: int,
    lora_rank: int,
    full: bool,
    keeps_floats: bool,
    keeps_gates: bool,
    segments: bool,
) -> Mapping[str, float]:
    """The value of each letter of a unit; `lora_rank` times the number of its targets."""
    wide, narrow = shape.norms
    w = shape.widths
    return {
        "N": tokens, "C": completion, "R": rows, "S": keys,
        "h": w["hidden"], "f": w["ffn"], "q": w["q"], "k": w["kv"],
        "heads": shape.heads, "kv_heads": shape.kv_heads,
        "rank": lora_rank,
        "normed": wide * w["hidden"] + (w["q"] + w["kv"] if narrow else 0),  # elements that norms of a layer multiply
        "further_norms": wide - 2,  # their number
        "lora": not full, "full": full, "gemma": wide > 2, "head_norms": narrow > 0, "grouped": w["kv"] != w["q"],
        "segments": segments, "repeated": segments and w["kv"] != w["q"],
        "keeps_floats": keeps_floats, "keeps_gates": keeps_gates,
    }  # fmt: skip


def bytes_of(terms: Sequence[Term], values: Mapping[str, float]) -> int:
    """Their sum."""
    return round(sum(term.bytes * prod(values[letter] for letter in term.unit.split()) for term in terms))


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
    attention, mlp = _sums(shape, learning, micro, KEPT_ATTENTION, KEPT_MLP)
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
        shape, learning, micro, AGAIN_MLP, AGAIN_LAST_NORM, AGAIN_MLP_ALONE, AGAIN_ATTENTION
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
    (norm,) = _sums(shape, learning, micro, LAST_NORM)
    return max(head_bytes(shape, learning, micro), norm, alone - kept_mlp)


def head_bytes(shape: Shape, learning: Learning, micro: Micro) -> int:
    """learner.model.logprob: one tile of logits, independent of V, and what grows with the tokens."""
    (head,) = _sums(shape, learning, micro, HEAD)
    tile = HEAD_TILE_ON_CARD if learning.cuda else HEAD_TILE
    trained = HEAD_TRAINED * shape.hidden if learning.mode == "full" else 0
    return bytes_of(tile, _letters(shape, learning, micro)) + head + trained


def _sums(shape: Shape, learning: Learning, micro: Micro, *tables: Sequence[Term]) -> list[int]:
    """The bytes of each table of this module in the base's type."""
    values = _letters(shape, learning, micro)
    return [DTYPE_BYTES[learning.dtype] // 2 * bytes_of(table, values) for table in tables]


def _letters(shape: Shape, learning: Learning, micro: Micro) -> Mapping[str, float]:
    rows = HEAD_ROWS_ON_CARD if learning.cuda else HEAD_ROWS
    return letters(
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
