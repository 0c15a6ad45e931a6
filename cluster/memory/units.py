"""Units of the memory model, and the parts that learner and generator have in common."""

from typing import Literal

from cluster.memory.shape import LINEAR, Shape

GB = 10**9
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CONTEXT = 500 * 10**6  # CUDA context and kernels of one process with torch, cuBLAS workspace (8 to 32 MiB) included

Parts = dict[str, int]  # bytes by part
Checkpointing = Literal["none", "mlp", "full"] | int
LoraRank = Literal[1, 2, 4, 8, 16, 32, 64, 128, 256]
OptimizerKind = Literal["adamw", "adamw_rounded", "adamw_8bit", "paged_adamw_8bit"]
# Of the device, per weight: two moments. Scales of 8-bit blocks are another 1 %; paged states may lie in host memory.
STATE_BYTES: dict[OptimizerKind, int] = {"adamw": 8, "adamw_rounded": 8, "adamw_8bit": 2, "paged_adamw_8bit": 0}


def base_bytes(shape: Shape, base: str, b: int, *, nested: bool = True) -> int:
    """The frozen base; embeddings and head are not quantised.

    nf4 (QLoRA 2305.14314, section 3): each linear weight half a byte, and a scale per 64 of them. `nested`, as the
    learner holds it: the scale has 8 bits, with a float32 scale per 256 of those, and bitsandbytes keeps two code
    tables of 272 floats per matrix. Otherwise, as vLLM holds it (it un-nests the scales as it loads): the scale is a
    float32, 0.5625 bytes a weight in all, with one code table of 16 floats per matrix.
    """
    if base == "none":
        return b * shape.params
    linear, matrices = shape.linear_params, len(LINEAR) * shape.layers
    scales = linear // 64 + 4 * linear // (64 * 256) + 4 * 272 * matrices if nested else linear // 16 + 64 * matrices
    return b * (shape.params - linear) + linear // 2 + scales


def total(*parts: Parts) -> int:
    """Sum over parts and roles."""
    return sum(sum(part.values()) for part in parts)
