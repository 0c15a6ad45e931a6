"""Tables of terms: what a step of the learner holds.

A term is a number of bytes times a unit, which is a product of letters (values: cluster.memory.learner.letters). N:
tokens of the largest micro-batch. C: its completion tokens. R: completion tokens in a tile of the head. S: keys that
its completions attend to (a shared prompt once per completion, or per block of them). h, f, q, k: width of the hidden
states, of the feed-forward block, of all query heads, of all key heads (also of all value heads), in elements. rank:
LoRA rank times the number of targets. experts, chosen, chosen_f: experts of a block, those that a token goes to, and
the width of these. routed, adapted_experts: whether a block has experts, and whether LoRA adapts them; expert_rank:
rank of the adapters of those that a token goes to; expert_adapters: weights of the adapters of all. state: elements
of the state of linear attention; state_heads, state_keys, state_values: its heads that have one, and the widths of
its keys and values; repeated_keys: width of its keys, once for each such head. every, every_f: experts of a block, and
the width of all, where each computes all tokens; dense_experts: whether they do. clamped: whether experts limit the
numbers of their gate. top, taught: a teacher's likeliest tokens that are asked for, and whether any are; tiles: those
of 8192 words that the vocabulary makes. Letters for a kind of model or of training are 0 or 1, unless a comment says
otherwise.

Bytes are those of a base in 16 bits; in float32 all but the head's tile count twice, which is an upper bound. Terms
are read from the operations, as the tensors that autograd saves; `measured` ones come from learner.tools.meta_run,
the real step on tensors without data. tests/cluster/memory/test_learner.py checks that the sums are within 2 % of its
peak.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True)
class Term:
    """A summand of a table. bytes: factor of the unit. unit: letters, multiplied. source: which tensors these are."""

    bytes: float
    unit: str
    source: str

    @cached_property
    def letters(self) -> tuple[str, ...]:
        return tuple(self.unit.split())


# What one layer keeps for its backward pass.
KEPT_MIXER = (
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
    Term(-8, "N h gemma_4", "what its norms do not keep beside float32 copies; measured"),
    Term(-2, "N q gemma_4", "the same of queries; measured"),
    Term(10, "N per_layer", "the gate of embeddings per layer, its activation and its product; measured"),
    Term(-2, "N h routed", "what the second norm gives, which experts do not keep"),
    Term(6, "N q gated", "the gate, its sigmoid, and attention's output times it"),
    Term(12, "N h convolution", "what in_proj gives (3 h), two products and the convolution's output"),
    # Linear attention as torch computes it, in chunks of 64 tokens in float32. Kernels that fuse it take less.
    Term(8, "N state_keys", "keys and queries before they are repeated; measured"),
    Term(32.2, "N state_values", "values, gates and outputs; measured"),
    Term(32.2, "N repeated_keys", "keys and queries, once for each value head; measured"),
    Term(1327, "N state_heads", "matrices of 64 x 64 of each chunk; measured"),
    Term(4 / 64, "N state", "the state before each chunk"),
)
KEPT_FEED = (
    Term(6, "N f", "gate, up, and their product"),
    Term(2, "N f keeps_gates", "the gate's activation, where it is no operation of a card"),
    # Experts that are frozen, computed by grouped products (transformers.integrations.moe): a token is there once for
    # each expert that it goes to.
    Term(6, "N chosen_f", "gate, up, and their product"),
    Term(6, "N chosen_f clamped", "gate and up within their limits, and the gate's sigmoid; measured"),
    Term(2, "N chosen h", "what each expert gives, before it is weighted"),
    Term(11, "N chosen", "measured"),
    Term(6, "N every_f", "gate, its activation, and up, of all experts where each computes all tokens (Llama 4)"),
    Term(2, "N every h", "a token's states, once for each of them"),
    Term(2, "N chosen h adapted_experts", "an expert's tokens, which its adapter reads"),
    Term(2, "N chosen_f adapted_experts", "the same of gate times up"),
    Term(4, "N expert_rank", "what the first matrices of the expert's two adapters give"),
    Term(4, "N experts", "the router's probabilities, float32"),
)

# What the backward pass of a block takes besides what its layer keeps, if the whole layer is recomputed.
AGAIN_FEED = (
    Term(2, "N h", "gradient of the layer's output"),
    Term(2, "N f", "gradient of the product; those of gate and up take their place"),
    Term(2, "N f keeps_gates", "gradients of gate and up, less what is freed; measured"),
    Term(2, "N h keeps_floats", "measured"),
    Term(250, "N", "measured"),
    Term(-3, "N h gemma", "what is freed before; measured"),
    Term(6, "N chosen h", "gradients of what experts give and read; measured"),
    Term(4, "N chosen_f clamped", "gradients of gate and up within their limits; measured"),
    Term(-4, "N chosen_f clamped adapted_experts", "what is freed before; measured"),
    Term(7.4, "N every h", "gradients of what all experts read and give, where each computes all tokens; measured"),
    Term(4, "N h routed", "measured"),
    Term(4, "expert_adapters", "adapters in order of their experts, and their gradients; measured"),
    Term(-4, "N h float_norms", "what is freed before of norms that are not fused; measured"),
)
AGAIN_LAST_NORM = (  # a lower bound for AGAIN_FEED in models with a norm behind the block
    Term(22, "N h gemma", "float32 temporaries of the backward pass of that norm; measured"),
    Term(1100, "N gemma", "measured"),
    Term(2, "C h gemma", "states of completion tokens, which the head has read"),
)
AGAIN_MIXER = (
    Term(2, "N h", "gradient of the layer's output"),
    Term(8, "N q", "gradients of queries and output, and FlashAttention's float32 gradient of the queries"),
    Term(-4, "N h", "what is freed before; measured"),
    Term(-8, "N h gemma", "what is freed before of its further norms; measured"),
    Term(4, "S k", "gradients of the gathered keys and values"),
    Term(4, "S q grouped", "FlashAttention expands keys and values to one per query head (mha_varlen_bwd)"),
    Term(6.8, "N state_values", "gradients of linear attention; measured"),
    Term(26.7, "N state_keys", "the same; measured"),
)
AGAIN_EXPERTS = (  # another lower bound, where experts are wide
    Term(2, "N h", "as above"),
    Term(6, "N chosen_f", "gradients of the product, of gate and of up"),
    Term(6, "N every_f", "the same of all experts, where each computes all tokens"),
    Term(-6, "N f dense_experts", "what its shared expert kept, freed before; measured"),
    Term(-2, "N chosen_f adapted_experts", "the product, freed before"),
    Term(-2.3, "N h routed", "what is freed before; measured"),
    Term(4, "expert_adapters", "as above"),
)
# What the backward pass of the MLP takes besides what its layer keeps, if only the MLP is recomputed.
AGAIN_FEED_ALONE = (
    Term(2, "N f", "as above"),
    Term(2, "N f keeps_gates", "as above"),
    Term(-1.85, "N h keeps_floats", "what is freed before; measured"),
    Term(-3.45, "N h gemma", "what is freed before of its further norms; measured"),
    Term(6, "N chosen h", "as above"),
    Term(4, "N chosen_f clamped", "as above"),
    Term(-5.2, "N h clamped", "what is freed before; measured"),
    Term(8, "N h routed", "measured"),
    Term(4, "expert_adapters", "as above"),
    Term(1.85, "N h float_norms", "measured"),
)

# The last norm, and the head (learner.model.logprob).
LAST_NORM = (
    Term(4, "N h", "what the last norm keeps, and the gradient of its input"),
    Term(16, "N h keeps_floats", "float32 temporaries of its backward pass; measured"),
)
HEAD = (
    Term(0.5, "N h", "measured"),
    Term(4, "C h", "a completion token's state, and its Jacobian"),
    Term(2, "C h taught lora", "the KL's Jacobian, where that is over a teacher's likeliest tokens"),
    Term(16, "C top", "these tokens' ids, logprobs, and the KL's derivatives"),
)
# A tile of the head has R completion tokens and 8192 words of the vocabulary; its bytes do not depend on the base's
# type.
HEAD_ROWS, HEAD_ROWS_ON_CARD = 512, 2048
ASKED = Term(13, "R top tiles lora", "places and logits of a teacher's likeliest tokens in each tile of the vocabulary")
HEAD_TILES_ON_CARD = (  # the larger one
    (
        Term(6 * 8192, "R", "logits in float32, and their weights in 16 bits"),
        Term(4, "R h", "the weighted sum of the head's rows, float32"),
        ASKED,
    ),
    (
        Term(2 * 8192, "R", "the weights, when the logits are freed"),
        Term(8, "R h", "the weighted sum of the head's rows, and what this tile adds to it, float32"),
        ASKED,
    ),
)
HEAD_TILE = (
    Term(6 * 8192, "R", "the weights in 16 bits, and in float32: no product of a CPU takes 16 bits and gives 32"),
    Term(8, "R h", "as on a card"),
    ASKED,
    Term(4 * 8192, "h", "the head's rows in float32, for the same reason"),
)
HEAD_TRAINED = 8 * 8192  # times h: a tile of the head's gradient in float32, and the summand of a tile of tokens


def bytes_of(terms: Sequence[Term], values: Mapping[str, float]) -> int:
    """The sum of the terms, rounded to bytes."""
    return round(sum(term.bytes * prod(map(values.__getitem__, term.letters)) for term in terms))
