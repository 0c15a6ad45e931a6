"""What a step of the learner holds, term by term: how many bytes, of what, and which tensors they are.

A unit is a product of letters. N tokens of the largest micro-batch, C of them completion tokens, R of these in a tile
of the head, S keys that its completions attend to (a shared prompt once per completion); h hidden, f feed-forward, q
all query heads, k all key heads (or value heads), in elements; rank: of the adapter, times its targets. Letters that
stand for a kind of model or of training are 0 or 1, unless a comment says otherwise.

Bytes are those of a base in 16 bits; in float32 all but the head's tile count twice, which is an upper bound. Sources:
what autograd saves, read from the operations; `measured` from learner.tools.meta_run, the real step on tensors without
content, to which tests/cluster/memory/test_learner.py holds the sums within 2 % of the peak.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from cluster.memory.shape import Shape


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
