"""The KV cache as vLLM cuts it: in blocks of tokens, one of which it keeps for itself. Pure."""

from math import ceil

from cluster.memory.generator import PREFILL_TOKENS
from cluster.memory.shape import Shape
from cluster.memory.units import DTYPE_BYTES

ELEMENT_BYTES = DTYPE_BYTES | {"fp8": 1}
BLOCK, BLOCK_CPU = 16, 32  # tokens: vLLM's own on CUDA, what rollout.vllm.convert asks for on a CPU


def cache_bytes(shape: Shape, dtype: str, tokens: int, count: int, *, cuda: bool) -> int:
    """Bytes that hold `count` sequences of that many tokens at once, at least 1 MiB."""
    blocks, size = _blocks(shape, dtype, tokens, cuda)
    return max((count * blocks + 1) * size, 2**20)


def cached_sequences(shape: Shape, dtype: str, tokens: int, kv_bytes: int, *, cuda: bool) -> int:
    """How many sequences of that many tokens the bytes hold at once; 0: not one, and vLLM would not start."""
    blocks, size = _blocks(shape, dtype, tokens, cuda)
    return max(kv_bytes // size - 1, 0) // blocks


def _blocks(shape: Shape, dtype: str, tokens: int, cuda: bool) -> tuple[int, int]:
    """(blocks of one sequence, bytes of a block). Layers with a window and others have blocks of their own, each of as
    many layers: vLLM fills up what is left over (v1/core/kv_cache_utils.py). A window may begin amid a block, and keeps
    what is scheduled: two engine steps, on a CPU as many tokens as there are."""
    block = BLOCK if cuda else BLOCK_CPU
    windowed, window = shape.windowed
    whole = shape.layers - windowed
    counts = [count for count in (whole, windowed) if count]
    layers = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    kept = ceil((min(window + 2 * PREFILL_TOKENS, tokens) if cuda else tokens) / block) + 1
    blocks = ceil(whole / layers) * ceil(tokens / block) + ceil(windowed / layers) * kept
    return blocks, block * layers * kv_token_bytes(shape, dtype) // shape.layers


def kv_token_bytes(shape: Shape, dtype: str) -> int:
    """Keys and values of one token, of all layers."""
    return 2 * shape.layers * shape.widths["kv"] * ELEMENT_BYTES[dtype]
