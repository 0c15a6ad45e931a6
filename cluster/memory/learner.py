"""The memory model of the learner for the planner: pure functions that give the bytes that a learner rank holds, by
part, from the model's shape and the settings (learner_bytes).

What torch keeps between two steps follows from types and counts (learner_static). A step adds the sum of what each
layer keeps for its backward pass and the most that one place of the pass takes besides (step_bytes, from tables of
terms). A divided base and a push of whole weights have sections of their own.

Letters: n trained weights; b bytes per element of the base's type; N tokens of the largest micro-batch; h hidden and f
feed-forward width; V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from cluster.memory.layers import Layer
from cluster.memory.quantised import FORMATS
from cluster.memory.shape import (
    ALL,
    CONTEXT,
    DTYPE_BYTES,
    STATE_BYTES,
    Base,
    Checkpointing,
    OptimizerKind,
    Parts,
    Shape,
    base_bytes,
)
from cluster.memory.terms import (
    AGAIN_EXPERTS,
    AGAIN_FEED,
    AGAIN_FEED_ALONE,
    AGAIN_LAST_NORM,
    AGAIN_MIXER,
    HEAD,
    HEAD_ROWS,
    HEAD_ROWS_ON_CARD,
    HEAD_TILE,
    HEAD_TILES_ON_CARD,
    HEAD_TRAINED,
    KEPT_FEED,
    KEPT_MIXER,
    LAST_NORM,
    bytes_of,
)

ReferenceKind = Literal["none", "auto", "int8"]


@dataclass(frozen=True, slots=True)
class Micro:
    """The largest micro-batch, as counts of tokens."""

    tokens: int  # N: all packed tokens
    completion: int  # C: completion tokens
    keys: int  # S: keys that its completions attend to; a shared prompt counts once per completion
    # (groups, tokens of a prompt, completions of a group, tokens of each that are computed); None: not known
    parts: tuple[float, int, float, int] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, prompt: int, completion: int, generations: int, budget: int) -> "Micro":
        """The micro-batch that fills the token budget, or holds one completion if that is longer, with prompts and
        completions of maximal length, packed as by learner.batch: a group beyond the budget is split, and each part
        repeats the prompt.

        No micro-batch has more tokens, but one may have more keys: a token has 1 + prompt / (tokens of a completion)
        keys, up to 1 + generations, so short completions of long prompts have more. If they do not fit, the step is
        retried with half the budget.
        """
        own = max(completion - 1, 1)
        tokens = max(budget, prompt + own)
        each = min(generations, (tokens - prompt) / own)
        keys = prompt + each * (prompt + own) if each > 1 else prompt + own
        groups = tokens / (prompt + each * own)
        return cls(tokens, round(groups * each * completion), round(groups * keys), (groups, prompt, each, own))

    def mask_elements(self, window: int) -> int:
        """Elements of the masks of one kind of layer where attention runs segment by segment: a row for each query of a
        block, over its prompt and the block, and the square of a prompt that is longer than the window.

        window: tokens of the layer's sliding window; 0: there is none.
        """
        if self.parts is None:
            return 0
        groups, prompt, each, own = self.parts
        together = min(each, max(max(prompt, BLOCK) // own, 1)) * own  # tokens of a block
        of_blocks = each * own * (prompt + together)
        return round(groups * (of_blocks + (prompt * prompt if 0 < window < prompt else 0)))

    def block_keys(self, window: int) -> int:
        """S where attention runs segment by segment: completions that are together no longer than their prompt are one
        block (learner.batch.layout), for which the prompt counts once.

        window: tokens to which the keys of a block are cut; 0: they are not. Tiles of a prompt then overlap.
        """
        if self.parts is None:
            return self.keys
        groups, prompt, each, own = self.parts
        blocks = ceil(each / max(prompt // own, 1))
        seen, overlap = (min(prompt, window - 1), window / WINDOW_TILE) if window else (prompt, 0.0)
        return round(groups * ((1 + overlap) * prompt + blocks * seen + each * own))


@dataclass(frozen=True, slots=True)
class Learning:
    """The settings of a learner that its memory depends on."""

    mode: Literal["lora", "full"] = "lora"
    push: Literal["adapter", "merged"] = "adapter"
    rank: int = 16
    targets: tuple[str, ...] = ALL
    dtype: str = "bfloat16"
    base: Base = "none"
    optimizer: OptimizerKind = "adamw"
    checkpointing: Checkpointing = "full"
    frozen_ranks: tuple[int, ...] = ()  # LoRA ranks of the adapters of the reference and of reward models
    reference: ReferenceKind = "none"  # a second set of weights; only with mode full
    offload: bool = False  # whether checkpointing=full keeps inputs of layers in host memory, and tiles dense MLPs
    cuda: bool = True
    value_rank: int = 0  # LoRA rank of PPO's value, an adapter on the same targets; 0: there is no value
    exact: bool = False  # learner.reduce: exact, which adds gradients in two float64 parts
    undo: bool = False  # whether each of several ranks keeps in main memory the state before its step
    ranks: int = 1  # ranks over which the base is divided (memory.layout: sharded)
    runs: int = 1  # whose adapters are on the base (gleaner sweep)
    top: int = 0  # a teacher's likeliest tokens, over which the KL is taken (learner.loss.teacher_top)
    fused: bool = True  # whether norms and MLPs are computed as gleaner does, and not as transformers' own modules do

    def keeps_floats(self, shape: Shape) -> bool:
        """Whether norms keep float32 copies of their inputs: transformers' norms do, and those that multiply by one
        plus their weights (Gemma's, Qwen3-Next's, Qwen3.5's) are never fused."""
        return shape.gemma or shape.kind.startswith(("qwen3_next", "qwen3_5")) or not self.fused

    @property
    def segments(self) -> bool:
        """Whether attention on a GPU runs segment by segment, with each key repeated for each query head.
        FlashAttention needs 16 bits and compute capability 8. Older GPUs train in float16, so float16 is taken as a
        sign of one; on a newer GPU the plan is then too large."""
        return self.cuda and self.dtype != "bfloat16"

    def keeps_gates(self, shape: Shape) -> bool:
        """Whether MLPs keep the activation of their gate: only the fused SwiGLU on a GPU does not."""
        unfused = shape.gemma or not self.fused or shape.kind == "lfm2"
        return unfused or shape.activation != "silu" or not self.cuda


# A base that is divided among the learner's ranks (memory.layout: sharded).

LAYERS = 3  # layers that are whole at the same time: the current one, the next, and the buffer that it arrives in
FILE_BYTES = 2**30  # bytes of a rank's rows that a checkpoint of a whole model writes to one file


def divided_params(shape: Shape, ranks: int) -> int:
    """Weights that one rank has: its rows of all matrices, and the whole of a tied embedding."""
    return _whole(shape) + -(-(shape.params - _whole(shape)) // ranks)


def sharded_base_bytes(shape: Shape, b: int, ranks: int) -> Parts:
    """Bytes of one rank's part of a frozen base, with what is gathered. b: bytes per element.

    gathered: the larger of LAYERS whole layers, and an embedding with the buffer that it arrives in.
    """
    embedding = b * shape.vocab * shape.hidden
    return {
        "weights": b * divided_params(shape, ranks),
        "gathered": max(LAYERS * b * _layer(shape), 2 * (embedding - b * _whole(shape))),
    }


def sharded_training_bytes(shape: Shape, b: int) -> Parts:
    """Bytes of one rank of a base that is trained, without the float32 masters, gradients and optimizer states of its
    divided_params.

    weights: the copy of a tied embedding in model.dtype; the copies of other weights are gathered. gathered: as in
    sharded_base_bytes, and for two layers of the backward pass the gradients in model.dtype and in float32, which the
    ranks sum. The gradient of an untied head stays in float32 to the end of the pass.
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
    mean = (shape.params - shape.embedding_params) // shape.layers
    return max(mean, *(layer.params for _, layer in shape.stacks))


# A push of whole weights (learner.push: merged; learner.mode: full). The pushed weights are in main memory: on CUDA no
# plan of a GPU counts them, on a CPU they are part of the memory of both roles. A pushed adapter is not counted.

# Copies on a CPU, as multiples of the pushed bytes, by the growth of resident sets (python -m benchmarks whole_push).
# Learner: the file that generators read has room for two policies, of which the learner maps one (1.0). Through the
# object store there are the learner's own bytes, and the store's pages of this push and of the push before (3.4 with 75
# MB). Generator (1.4 and 1.9): its view, and vLLM's copies of the layer that is being loaded.
FILE_COPIES, STORE_COPIES, GENERATOR_COPIES = 2, 3, 2
# A generator of several processes: the view of its main process, which hashes the weights (estimate). If the weights
# come through the object store the view is a copy, from which the other processes read (rollout.vllm.policies).
SHARDS_COPIES = 1


def pushed_bytes(shape: Shape, mode: str, push: str, targets: tuple[str, ...], b: int) -> int:
    """Bytes of the weights of one push: the whole model with mode full, the linear weights of the blocks (modules
    such as self_attn and mlp) in which the adapter targets any with push merged (learner.model.policy), 0 with push
    adapter. b: bytes of an element."""
    if mode == "full":
        return b * shape.params
    if push == "adapter":
        return 0
    sent = 0
    for count, layer in shape.stacks:
        blocks = {one.parent for one in shape.adapted(layer, targets)}
        sent += count * sum(one.weights for one in layer.linears if one.parent in blocks)
    return b * sent


def learner_copies(*, undo: bool) -> int:
    """Copies of a push that the learner holds. With several ranks (undo), which are replaced one by one, a push must
    outlive the rank that sent it, so it goes through the object store."""
    return STORE_COPIES if undo else FILE_COPIES


def merging_bytes(shape: Shape) -> int:
    """Bytes that merging an adapter takes: the largest matrix in float32, since one matrix at a time is merged in
    float32, rounded and sent."""
    return 4 * shape.largest


def learner_static(shape: Shape, learning: Learning) -> Parts:
    """The bytes that a learner rank holds between two steps, by part.

    weights: the base, b per parameter; nf4 see cluster.memory.shape.base_bytes.
    adapters: with LoRA b n for the model and 4 n for float32 masters (in float32 the two are one), and b per weight of
      each frozen adapter. With full fine-tuning 4 n masters for adamw in 16 bits, and always if the base is divided
      (n is then that of the rank); other optimizers have none and round (learner.trainer.optimizer). PPO's value: the
      same for its adapter, and a float32 head of h weights.
    gradients: 4 n, or b n without masters; exact sums (learner.trainer.optimizer) take another 16 n.
    optimizer: AdamW's two float32 moments, 8 n; in 8 bits (2110.02861) 2 n and a float32 scale per 256 values. Paged
      moments may lie in host memory and count 0.
    reference: of full fine-tuning with beta > 0 (learner.model.reference).
    undo: on a CPU only, see undo_bytes.
    Of several runs each has an adapter and an optimizer; gradients are those of one run at a time.
    """
    b = DTYPE_BYTES[learning.dtype]
    n = trained_params(shape, learning)
    head, value = value_params(shape, learning.value_rank, learning.targets)
    masters = learning.mode == "lora" or learning.optimizer == "adamw" or learning.ranks > 1
    divided = learning.mode == "full" and learning.ranks > 1
    adapters = (4 if divided or (b < 4 and masters) else 0) * n
    if learning.mode == "lora":
        frozen = sum(shape.lora_params(rank, learning.targets) for rank in learning.frozen_ranks)
        adapters = learning.runs * (adapters + b * n) + b * frozen
        adapters += (b + (4 if b < 4 else 0)) * value + 4 * head
    n += value + head
    scales = n // 32 if learning.optimizer == "adamw_8bit" else 0
    return {
        **_base(shape, learning, b),
        "adapters": adapters,
        "gradients": ((4 if masters else b) + (16 if learning.exact else 0)) * n,
        "optimizer": learning.runs * (STATE_BYTES[learning.optimizer] * n + scales),
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
    """Bytes of main memory that keep the masters and moments of n weights as they were before a step
    (learner.ranks.rank)."""
    return (4 + STATE_BYTES[optimizer]) * n


def value_params(shape: Shape, rank: int, targets: tuple[str, ...]) -> tuple[int, int]:
    """(weights of the head, weights of the adapter) of PPO's value; (0, 0) if its LoRA rank is 0."""
    return (shape.hidden if rank else 0), shape.lora_params(rank, targets)


def trained_params(shape: Shape, learning: Learning) -> int:
    """n: the trained weights of one rank, those of the adapter or of the rank's part of the model."""
    if learning.mode == "lora":
        return shape.lora_params(learning.rank, learning.targets)
    return divided_params(shape, learning.ranks)


def reference_bytes(shape: Shape, kind: ReferenceKind, b: int, ranks: int) -> int:
    """Bytes of a rank's reference model: b per parameter of the rank's part. (Its forward pass gathers less than a
    training step does.)

    int8, without division among ranks: a byte per linear weight of the layers, and b per row for the row's scale. Each
    matrix is dequantised in turn, in a pass that keeps nothing else and stays far below the step's peak.
    """
    if kind == "none":
        return 0
    if kind == "auto":
        return b * divided_params(shape, ranks)
    rows = sum(count * one.outputs for count, one in shape.matrices())
    return b * (shape.params - shape.linear_params) + shape.linear_params + b * rows


# What a step of the learner holds, by the terms of cluster.memory.terms.


def letters(shape: Shape, layer: Layer, learning: Learning, micro: Micro) -> Mapping[str, float]:
    """The value of each letter of a unit for a layer."""
    mixer, feed, wide = layer.mixer, layer.feed, layer.wide_norms
    floats, repeated = learning.keeps_floats(shape), mixer.keys != mixer.queries
    sinks, capped = learning.cuda and shape.kind == "gpt_oss", shape.kind == CAPPED
    segments = learning.segments or sinks or capped  # FlashAttention has neither
    norms = wide * shape.hidden + (mixer.queries + mixer.keys if layer.head_norms else 0)
    rows = min(HEAD_ROWS_ON_CARD if learning.cuda else HEAD_ROWS, micro.completion)
    lora_rank = max(learning.rank, learning.value_rank)
    widths = shape.expert_widths(layer, learning.targets)
    count, chosen, of_expert = (0, 0, 0) if feed.experts is None else (
        feed.experts.count, feed.experts.chosen, feed.experts.ffn
    )  # fmt: skip
    every = count if shape.kind == "llama4_text" else 0  # transformers computes all experts of all tokens
    chosen = 0 if every else chosen
    width = mixer.recurrent // mixer.state_values if mixer.state_values else 0
    return {
        "N": micro.tokens, "C": micro.completion, "R": rows,
        "S": micro.block_keys(mixer.window if sinks else 0) if segments else micro.keys,
        "h": shape.hidden, "f": feed.ffn, "q": mixer.queries, "k": mixer.keys,
        "heads": mixer.heads, "kv_heads": mixer.kv_heads,
        "rank": lora_rank * len(shape.adapted(layer, learning.targets)),
        "top": learning.top, "taught": learning.top > 0, "tiles": -(-shape.vocab // VOCAB_TILE),
        "normed": norms,  # elements that a layer's norms multiply
        "further_norms": wide - 2,  # how many norms a layer has beyond two
        "lora": learning.mode == "lora", "full": learning.mode == "full", "gemma": wide > 2,
        "head_norms": layer.head_norms, "grouped": repeated,
        "segments": segments and not capped, "repeated": segments and repeated,
        "clamped": shape.kind == "gpt_oss",  # whether experts limit the numbers of their gate
        "keeps_floats": floats, "keeps_gates": learning.keeps_gates(shape),
        "experts": count, "chosen": chosen, "chosen_f": chosen * of_expert, "routed": count > 0,
        "every": every, "every_f": every * of_expert, "dense_experts": every > 0,
        "adapted_experts": widths > 0, "expert_rank": chosen * lora_rank if widths else 0,
        "expert_adapters": lora_rank * widths,
        "gemma_4": shape.kind == "gemma4_text", "per_layer": sum(min(one[1:]) for one in layer.linear) // 2,
        "float_norms": floats and not learning.keeps_gates(shape),
        "gated": mixer.gated, "convolution": mixer.convolved > 0 and mixer.recurrent == 0,
        "state": mixer.recurrent, "state_heads": mixer.state_heads, "state_keys": mixer.state_keys,
        "state_values": mixer.state_values, "repeated_keys": mixer.state_heads * width,
    }  # fmt: skip


CAPPED = "gemma2"  # model_type whose attention caps its scores
FRAGMENTATION = 0.04  # share of a step's bytes in blocks that the caching allocator cannot join; 3 to 10 % is usual
# On a CPU the memory of a role is the resident set of its process. Measured on Linux (two cores, torch 2.13, vLLM 0.32)
# with the models of examples/: bytes before a model is loaded, bytes that the first use of torch adds, and the share of
# a step's bytes that malloc keeps.
LEARNER_PROCESS, LEARNER_WORKSPACE, MALLOC = 530 * 10**6, 85 * 10**6, 0.35

VOCAB_TILE = 8192  # learner.model.logprob.VOCAB_TILE, which the driver cannot import: it loads no torch
WIDENED_ROWS = 1024  # learner.model.lora.TILE, likewise
WINDOW_TILE = 512  # learner.model.attention.WINDOW_TILE, likewise
MLP_TILE = 4096  # learner.model.policy.MLP_TILE, likewise
BLOCK = 128  # learner.batch.layout.BLOCK, likewise


def learner_bytes(shape: Shape, learning: Learning, micro: Micro) -> Parts:
    """The bytes that a learner rank holds at its peak, by part; the device must have their sum for it."""
    static, step = learner_static(shape, learning), step_bytes(shape, learning, micro)
    lost = round((FRAGMENTATION if learning.cuda else MALLOC) * sum(step.values()))
    sent = pushed_bytes(shape, learning.mode, learning.push, learning.targets, DTYPE_BYTES[learning.dtype])
    host = {} if learning.cuda else {"push": learner_copies(undo=learning.undo) * sent, "workspace": LEARNER_WORKSPACE}
    return static | step | {"fragmentation": lost, **host, "context": learner_context(cuda=learning.cuda)}


def learner_context(*, cuda: bool) -> int:
    """Bytes of the learner's process before it holds a tensor. The learner's limit does not include them: it counts
    tensors on CUDA, and the growth from then on on a CPU (learner.trainer.memory_limit)."""
    return CONTEXT if cuda else LEARNER_PROCESS


def step_bytes(shape: Shape, learning: Learning, micro: Micro) -> Parts:
    """The bytes that a step adds at its peak, by part.

    checkpoints: inputs of the layers that are recomputed. activations: what the other layers keep. live: the most that
      one place takes besides, the tile of the head or the current layer. The peak is in the last layers, where the
      backward pass begins; with checkpointing=k it can also be in layer k.
    update: what the optimizer step or the push takes beyond that peak, when there are no activations. With float32
      masters of a 16-bit model these are all gradients of a micro-batch, b n, at the end of the backward pass (fused
      AdamW takes nothing). Without masters they are 6 bytes per weight of the largest matrix: the matrix and random
      bits in the size of float32, less its gradient. A merged push takes the largest matrix in float32.
    """
    found = [(count, layer_bytes(shape, layer, learning, micro)) for count, layer in shape.stacks]
    of_mixers = sum(count * one.mixer for count, one in found)
    of_layers = of_mixers + sum(count * one.feed for count, one in found)
    whole, alone, last = (max(getattr(one, name) for _, one in found) for name in ("whole", "alone", "kept"))
    boundary = DTYPE_BYTES[learning.dtype] * shape.hidden * micro.tokens
    norm = boundary * (2 if learning.keeps_floats(shape) else 1)  # input of the last norm, in float32 if not fused
    policy, layers = learning.checkpointing, shape.layers
    if policy == "none":
        parts = {"checkpoints": 0, "activations": of_layers, "live": last}
    elif policy == "mlp":
        parts = {"checkpoints": 0, "activations": of_mixers, "live": max(alone, last)}
    elif policy == "full":
        held = 0 if learning.offload else layers * boundary
        # While the head is computed, the input of the last norm is kept too.
        parts = {"checkpoints": held, "activations": 0, "live": max(whole, last + norm)}
    else:
        first = min(policy, layers)
        # The first layer is among those that are recomputed. (It keeps less, since no gradient is needed before it.)
        # Layers that are not alike count with their mean.
        activations = (layers - first) * of_layers // layers + norm if first < layers else 0
        end = activations + (last if first < layers else 0)
        live = max(end, whole, found[0][1].head) - activations
        parts = {"checkpoints": first * boundary, "activations": activations, "live": live}
    parts["live"] += _mask_bytes(shape, learning, micro)
    if learning.mode == "full":  # the gradient of the head exists before all others
        parts["live"] += DTYPE_BYTES[learning.dtype] * shape.vocab * shape.hidden
    return parts | {"update": max(0, _update_bytes(shape, learning) - sum(parts.values()))}


def _mask_bytes(shape: Shape, learning: Learning, micro: Micro) -> int:
    """Bytes of the masks that all layers share where attention runs segment by segment (learner.batch.layout): one for
    each block and each window that is shorter than what its queries see. (Those of attention with sinks are part of
    what its terms measure.)"""
    if micro.parts is None or not (learning.segments or shape.kind == CAPPED):
        return 0
    _, prompt, _, own = micro.parts
    windows = {layer.mixer.window for _, layer in shape.stacks if layer.mixer.heads}
    kinds = {window if window < prompt + own else 0 for window in windows}
    return DTYPE_BYTES[learning.dtype] * sum(map(micro.mask_elements, kinds))


def _update_bytes(shape: Shape, learning: Learning) -> int:
    if learning.mode == "lora":
        return merging_bytes(shape) if learning.push == "merged" else 0
    if learning.ranks > 1:
        return 0  # the gradients of each layer are summed and divided among the ranks during the backward pass
    if learning.optimizer == "adamw":
        return 0 if learning.dtype == "float32" else DTYPE_BYTES[learning.dtype] * shape.params
    return 6 * shape.vocab * shape.hidden


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one layer in a step.

    mixer, feed: what attention with the norms, and the feed-forward block, keep for the backward pass. whole, alone:
    the most that is held while the layer is recomputed for it: all of it, or its feed-forward block alone. kept: the
    most that is held besides what all layers keep: for the head's tile, for the backward pass of the last norm, or for
    that of this layer as the last, which takes little more than it frees. head: of the head alone.
    """

    mixer: int
    feed: int
    whole: int
    alone: int
    kept: int
    head: int


def layer_bytes(shape: Shape, layer: Layer, learning: Learning, micro: Micro) -> LayerBytes:
    """What a layer holds.

    A 4-bit base dequantises its largest matrix for a product of the feed-forward block's backward pass. If the block is
    not fused, 2 N f bytes of its gradients do not exist yet at that moment, and only the bytes of the matrix beyond
    those are added. The head (learner.model.logprob) has a tile of logits, independent of V, and what grows with
    tokens.
    """
    values, times = letters(shape, layer, learning, micro), DTYPE_BYTES[learning.dtype] // 2
    tables = (
        KEPT_MIXER,
        KEPT_FEED,
        AGAIN_FEED,
        AGAIN_LAST_NORM,
        AGAIN_FEED_ALONE,
        AGAIN_MIXER,
        LAST_NORM,
        HEAD,
        AGAIN_EXPERTS,
    )
    mixer, feed, of_feed, norm, of_feed_alone, of_mixer, last, head, experts = (
        times * bytes_of(one, values) for one in tables
    )
    not_yet = DTYPE_BYTES[learning.dtype] * micro.tokens * layer.feed.ffn if learning.keeps_gates(shape) else 0
    extra = max(0, _dequantised(shape, learning) - not_yet) + _widened(shape, learning)
    dense = layer.feed.experts is None and any(one.name == "down_proj" for one in layer.feed.linear)
    tiled = learning.offload and learning.fused and dense and micro.tokens > MLP_TILE
    if tiled:  # by tiles of tokens (learner.model.policy.tile_mlps)
        tile = dict(values) | {"N": MLP_TILE}
        feed, of_feed = (times * bytes_of(table, tile) for table in (KEPT_FEED, AGAIN_FEED))
        # Of whole rows are its output, the gradient of that, and the gradient of its input.
        of_feed += 3 * DTYPE_BYTES[learning.dtype] * round(values["h"] * (values["N"] - tile["N"]))
    beside = feed if not tiled else 0  # no tile is there while the norm behind the block goes back
    whole = mixer + max(feed + max(of_feed, experts) + extra, beside + norm + extra, of_mixer)
    alone = max(feed + max(of_feed_alone, experts) + extra, of_mixer)
    head += max(bytes_of(tile, values) for tile in (HEAD_TILES_ON_CARD if learning.cuda else (HEAD_TILE,)))
    head += HEAD_TRAINED * shape.hidden if learning.mode == "full" else 0
    return LayerBytes(mixer, feed, whole, alone, max(head, last, alone - feed), head)


def _dequantised(shape: Shape, learning: Learning) -> int:
    """Bytes of a layer's largest matrix, dequantised, with its scales in float32; 0 if the base has 16 or 32 bits."""
    stored = shape.stored if learning.base == "none" else FORMATS.get(learning.base)
    if learning.base == "none" and stored is None:
        return 0
    experts = 0 if stored is None else max(layer.expert_weights for _, layer in shape.stacks)
    largest = max(shape.largest, 2 * experts // 3)  # experts' gate and up projections, at once (estimate)
    return largest * DTYPE_BYTES[learning.dtype] + largest // 16


def _widened(shape: Shape, learning: Learning) -> int:
    """Bytes of a layer's largest matrix in float32, and of the rows that it multiplies, on a CPU without instructions
    for 16 bits (learner.model.lora); a CPU with them needs less."""
    if learning.cuda or learning.base == "nf4" or learning.mode == "full" or learning.dtype == "float32":
        return 0
    return 4 * shape.largest + 4 * WIDENED_ROWS * (shape.hidden + shape.ffn)


def mlp_share(shape: Shape) -> float:
    """The feed-forward block's share of a layer's linear weights, and so of its work."""
    feed = sum(count * layer.feed_work for count, layer in shape.stacks)
    mixing = sum(count * one.weights for count, layer in shape.stacks for one in layer.mixer.linear)
    return feed / (feed + mixing)
