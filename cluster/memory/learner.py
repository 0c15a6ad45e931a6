"""The memory model of the learner: what it holds, in bytes, by part. Pure functions of a shape and settings. What a
generator holds is in cluster.memory.generator.

Letters: h hidden, f feed-forward, q all query heads, k all key heads (or value heads) in elements; L layers; n adapter
weights; b bytes per element of the base's type; N tokens of the largest micro-batch, C of them completion tokens,
S keys that its completions attend to (a shared prompt once per completion); V vocabulary; r rank.

Sources. What torch keeps between two steps follows from types and counts. What a step takes on top is a sum of what
each layer keeps and a maximum over the places where it can be highest; the coefficients are those of
learner.tools.meta_run (the real step on tensors without content), and a test holds them to it within 2 % of the peak.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.memory.shape import LINEAR, Shape
from cluster.memory.units import CONTEXT, DTYPE_BYTES, Checkpointing, Parts, base_bytes
from cluster.memory.weight_push import LEARNER_COPIES, merging_bytes, pushed_bytes

FRAGMENTATION = 0.04  # of what a step takes: blocks that the caching allocator cannot join; 3 to 10 % is usual
# On a CPU a role is a process, its memory the resident set. Measured on Linux (two cores, torch 2.13, vLLM 0.32) with
# the models of examples/: what there is before a model; what first use adds; and what malloc keeps of a step.
LEARNER_PROCESS, LEARNER_WORKSPACE, MALLOC = 530 * 10**6, 85 * 10**6, 0.35
HEAD_TILE = 43 * 10**6  # learner.model.logprob: 512 x 8192 logits in float32, their weights, and the latter in 16 bits

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
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    checkpointing: Checkpointing = "full"
    frozen_adapters: int = 0  # reference and other roles
    reference: ReferenceKind = "none"  # of mode full: a second set of weights
    offload: bool = False  # boundaries of checkpointing=full in host memory
    cuda: bool = True


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

    weights: b per parameter. nf4 (QLoRA 2305.14314, section 3): each linear weight half a byte, an 8-bit scale per 64
      of them and a float32 scale per 256 of those; bitsandbytes keeps two code tables of 272 floats per matrix.
    adapters: LoRA, b n that the model computes with and 4 n float32 masters (one and the same in float32), and b n for
      each frozen adapter. Full fine-tuning: 4 n masters, none with an 8-bit optimizer, which rounds (see
      learner.trainer.stochastic_rounding).
    gradients: 4 n, of the masters; b n without masters.
    optimizer: AdamW two float32 states, 8 n; in 8 bits (2110.02861) 2 n and a float32 scale per 256. Paged states lie
      in host memory when the device is full.
    reference: of full fine-tuning with beta > 0 (learner.model.reference).
    """
    b = DTYPE_BYTES[learning.dtype]
    n = trained_params(shape, learning)
    masters = learning.mode == "lora" or learning.optimizer == "adamw"
    adapters = (4 if b < 4 and masters else 0) * n
    if learning.mode == "lora":
        adapters += (1 + learning.frozen_adapters) * b * n
    states = {"adamw": 8 * n, "adamw_8bit": 2 * n + n // 32, "paged_adamw_8bit": 0}
    return {
        "weights": base_bytes(shape, learning.base, b),
        "adapters": adapters,
        "gradients": (4 if masters else b) * n,
        "optimizer": states[learning.optimizer],
        "reference": reference_bytes(shape, learning.reference, b),
    }


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
    micro-batch's gradients, b n, at the end of the backward pass; fused AdamW takes nothing. Without masters, 12 bytes
    per weight of the largest matrix, which is updated in float32. Where a push is merged, that matrix in float32.
    """
    kept_attention, kept_mlp = kept_per_layer(shape, learning, micro)
    layer = kept_attention + kept_mlp
    boundary = DTYPE_BYTES[learning.dtype] * shape.hidden * micro.tokens
    again, kept = live_again(shape, learning, micro), live_kept(shape, learning, micro)
    policy, layers = learning.checkpointing, shape.layers
    if policy == "none":
        parts = {"checkpoints": 0, "activations": layers * layer, "live": kept}
    elif policy == "mlp":
        parts = {"checkpoints": 0, "activations": layers * kept_attention, "live": max(again[1], kept)}
    elif policy == "full":
        held = 0 if learning.offload else layers * boundary
        parts = {"checkpoints": held, "activations": 0, "live": max(again[0], kept)}
    else:
        first = min(policy, layers)
        # Nothing in front of the first layer wants a gradient, so it keeps 4 N h less; here it is not among the kept.
        activations = (layers - first) * layer + 2 * boundary if first < layers else 0
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
    return 12 * shape.vocab * shape.hidden


def kept_per_layer(shape: Shape, learning: Learning, micro: Micro) -> tuple[int, int]:
    """(attention and norms, feed-forward) that a layer of 16 bits keeps for its backward pass:

    N (12 h + 4 q + 4 heads + 2 r per target) + 4 S k, and 8 N f. The norms keep float32 copies (2 x 4 h), the
    residual stream and the adapters' inputs 2 h each; attention its queries, output, gathered keys and values, and
    logsumexp; the feed-forward block gate, its activation, up, and their product. Norms of queries and keys add
    N (4 q + 4 k), further norms of the layer (Gemma) 4 h each. Norms that train also keep what their weight multiplies,
    in 16 bits (Gemma: float32). In float32 twice as much, which is an upper bound.
    """
    w, n = shape.widths, micro.tokens
    wide, narrow = shape.norms
    attention = n * ((12 + 4 * (wide - 2)) * w["hidden"] + 4 * w["q"] + 4 * shape.heads) + 4 * micro.keys * w["kv"]
    if learning.mode == "lora":
        attention += 2 * n * learning.rank * len(learning.targets)
    if narrow:
        attention += 4 * n * (w["q"] + w["kv"] + shape.heads + shape.kv_heads)
    if learning.mode == "full":
        normed = wide * w["hidden"] + (w["q"] + w["kv"] if narrow else 0)
        attention += (4 if wide > 2 else 2) * n * normed
    factor = DTYPE_BYTES[learning.dtype] // 2
    return factor * attention, factor * 8 * n * w["ffn"]


def live_again(shape: Shape, learning: Learning, micro: Micro) -> tuple[int, int]:
    """The most that is held while one layer is computed a second time for its backward pass; and the same where only
    its MLP is (checkpointing=mlp).

    Backward of the feed-forward block: the layer again, and N (4 f + 2.1 h) for the gradients of gate, up and product.
    If a norm follows the block (Gemma): at least 22 N h, the float32 temporaries of that norm.
    Backward of attention: its part of the layer, and N (8 q - 4 h) + 4 S k for gradients, of which one is
    FlashAttention's float32 gradient of the queries. With fewer key than query heads 4 S q more, since it expands keys
    and values to one per query head (mha_varlen_bwd).
    A 4-bit base: its largest matrix is multiplied out for one product of the feed-forward block's backward pass. At
    that moment 2 N f of the gradients above do not exist yet, so only what the matrix takes beyond them is added.
    """
    kept_attention, kept_mlp = kept_per_layer(shape, learning, micro)
    w, n = shape.widths, micro.tokens
    factor = DTYPE_BYTES[learning.dtype] // 2
    gemma = shape.norms[0] > 2
    mlp = n * (4 * w["ffn"] + int(2.1 * w["hidden"]) + 250)
    if gemma:
        mlp = max(mlp - 3 * n * w["hidden"], n * (22 * w["hidden"] + 1100))
    alone = n * (4 * w["ffn"] - int((5.3 if gemma else 1.85) * w["hidden"]))
    attention = n * (8 * w["q"] - (12 if gemma else 4) * w["hidden"]) + 4 * micro.keys * w["kv"]
    if w["kv"] != w["q"]:
        attention += 4 * micro.keys * w["q"]
    extra = max(0, _dequantised(shape, learning) - factor * 2 * n * w["ffn"])
    layer = kept_attention + max(kept_mlp + factor * mlp + extra, factor * attention)
    return layer, max(kept_mlp + factor * alone + extra, factor * attention)


def live_kept(shape: Shape, learning: Learning, micro: Micro) -> int:
    """The most that is held beside what all layers keep: the head's tile, the backward pass of the last norm (20 N h),
    or that of the last layer, which takes little more than it frees."""
    _, alone = live_again(shape, learning, micro)
    _, kept_mlp = kept_per_layer(shape, learning, micro)
    norm = 20 * micro.tokens * shape.hidden * DTYPE_BYTES[learning.dtype] // 2
    return max(head_bytes(shape, learning, micro), norm, alone - kept_mlp)


def head_bytes(shape: Shape, learning: Learning, micro: Micro) -> int:
    """learner.model.logprob: one tile of logits, independent of V; the rows of the head that a tile of tokens needs;
    and per completion token its state and its Jacobian. A trained head also has one tile of its gradient in float32."""
    factor = DTYPE_BYTES[learning.dtype] // 2
    trained = 8192 * shape.hidden * 4 if learning.mode == "full" else 0
    return HEAD_TILE + factor * shape.hidden * (37_300 + micro.tokens // 2 + 4 * micro.completion) + trained


def _dequantised(shape: Shape, learning: Learning) -> int:
    """The largest matrix of a layer, multiplied out for its product, with its scales in float32."""
    if learning.base == "none":
        return 0
    largest = max(i * o for i, o in map(shape.linear, LINEAR))
    return largest * DTYPE_BYTES[learning.dtype] + largest // 16


def mlp_share(shape: Shape) -> float:
    """The feed-forward block's part of the weights, hence of the work, of a layer."""
    work: Sequence[int] = [i * o for i, o in map(shape.linear, LINEAR)]
    return sum(work[4:]) / sum(work)
