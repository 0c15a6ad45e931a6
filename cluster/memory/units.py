"""Units of the memory model, and the parts that learner and generator have in common."""

from typing import Literal

from cluster.memory.shape import LINEAR, Shape

GB = 10**9
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CONTEXT = 500 * 10**6  # CUDA context and kernels of one process with torch, cuBLAS workspace (8 to 32 MiB) included

Parts = dict[str, int]  # bytes by part
Checkpointing = Literal["none", "mlp", "full"] | int


def base_bytes(shape: Shape, base: str, b: int) -> int:
    """The frozen base; embeddings and head are not quantised."""
    if base == "none":
        return b * shape.params
    linear = shape.linear_params
    tables = 4 * 272 * len(LINEAR) * shape.layers
    return b * (shape.params - linear) + linear // 2 + linear // 64 + 4 * linear // (64 * 256) + tables


def total(*parts: Parts) -> int:
    """Sum over parts and roles."""
    return sum(sum(part.values()) for part in parts)
