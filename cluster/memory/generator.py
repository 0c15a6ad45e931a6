"""The memory model of a generator: what vLLM holds, in bytes, by part. Letters as in cluster.memory.

The figures are measured, or those of vLLM's documentation and source, else estimates; it is said which.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from cluster.memory.learner import GENERATOR_COPIES, SHARDS_COPIES
from cluster.memory.shape import DTYPE_BYTES, LINEAR, Parts, Shape, base_bytes

# On a card, measured on an H200 with vLLM 0.32, in bfloat16, as what nvidia-smi says of the process less what its
# tensors take (benchmarks/results/gpu_h200.md): CUDA context and kernels, 0.81 GB (1B, 8B); graphs, 17.3 and 17.8 MB a
# layer; what is left over, beyond the tensors of a step: 0.04 GB (0.5B), 0.55 (8B) and 0.69 (1B).
ENGINE_CONTEXT = 800 * 10**6
GRAPHS_OF_LAYER = 18 * 10**6
KEPT = 700 * 10**6
# On a CPU: the process before it has a model, measured as in cluster.memory.learner. What malloc keeps grows, ever more
# slowly: with local_cpu.yaml 0.9 GB at first, 1.1 after 30 steps, 1.3 after 60.
ENGINE_PROCESS = 1050 * 10**6
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
PREFILL_TOKENS = 4096  # of one engine step, as rollout.vllm.convert asks for; bounds the activations of prefill


@dataclass(frozen=True, slots=True)
class Serving:
    """How a generator serves, as far as it matters for memory."""

    dtype: str = "bfloat16"
    base: Literal["none", "nf4"] = "none"
    rank: int = 16
    adapters: int = 2  # policy versions resident at once; 0 where weights are replaced
    pushed: int = 0  # bytes of the weights that a push replaces
    sequences: int = 128  # decoded at once
    kv_bytes: int = 0
    targets: tuple[str, ...] = tuple(LINEAR)
    cuda: bool = True
    longest: int = 0  # tokens, prompt and completion
    shards: int = 1  # processes over which the model is spread, each with a card


def generator_bytes(shape: Shape, serving: Serving) -> Parts:
    """What vLLM holds while it generates; with shards, what one of its cards does.

    weights: the base, or an even share of it; nf4 with float32 scales. kv_cache: what it is given
      (kv_cache_memory_bytes). lora_slots: b n, on a CPU 4 n, for each policy version (max_loras buffers of the highest
      rank), n of the adapted matrices and of those that vLLM computes in one with them; on a CPU of a model in bfloat16
      as much again for the packed copies (rollout.vllm.cpu), of rank 16 at least, to which these are padded.
    workspace: activations of one engine step of up to 4096 tokens, b (2 f + 4 h) each, of a shard f / shards; and 16 V
      per sequence for float32 logits and what sampling makes of them (estimate).
    graphs: CUDA graphs, none on a CPU. push: on a CPU, weights that arrive (cluster.memory.learner); on CUDA they
      do one layer at a time, while no step is run. fragmentation: of the allocator on a card. context: one process.
    nf4: bitsandbytes multiplies a matrix out for a product with many tokens (backends/cuda/ops.py: always beyond 1536,
      on some cards from 5 on), and vLLM's plugin copies that product to its place: workspace has the largest matrix in
      16 bits and f for each token on top, and graphs such a matrix of their own.
    """
    b = DTYPE_BYTES[serving.dtype]
    tokens = max(PREFILL_TOKENS, serving.sequences, 0 if serving.cuda else serving.longest)  # a CPU splits no prefill
    in_4_bits = serving.base == "nf4"
    matrix = in_4_bits * b * max(i * o for i, o in map(shape.linear, LINEAR))
    shards, processes = serving.shards, engine_processes(serving.shards)
    activations = tokens * b * ((3 if in_4_bits else 2) * shape.ffn // shards + 4 * shape.hidden)
    graphs = GRAPHS_OF_LAYER * shape.layers + matrix
    copies = GENERATOR_COPIES + (SHARDS_COPIES + shards - 1 if shards > 1 else 0)  # vLLM's in each further process
    extra = {"graphs": graphs, "fragmentation": KEPT} if serving.cuda else {"push": copies * serving.pushed}
    here = 1 if serving.cuda else shards  # shards in one memory
    rank = 8 if 1 < serving.rank < 8 else serving.rank  # vLLM's buffers have no other rank below 8 than 1
    slots = (b if serving.cuda else 4) * shape.lora_params(rank, _in_one(serving.targets), shards)
    if not serving.cuda and serving.dtype == "bfloat16":
        slots += 4 * shape.lora_params(max(rank, 16), _in_one(serving.targets), shards)
    return {
        "weights": here * base_bytes(shape, serving.base, b, nested=False) // shards,
        "kv_cache": here * serving.kv_bytes // shards,
        "lora_slots": here * serving.adapters * slots,
        "workspace": here * (activations + matrix + 16 * serving.sequences * shape.vocab),
        **extra,
        "context": ENGINE_CONTEXT if serving.cuda else processes * ENGINE_PROCESS,
    }


def _in_one(targets: tuple[str, ...]) -> tuple[str, ...]:
    """The targets, and what vLLM has in one layer with them (vllm/lora/layers/column_parallel_linear.py)."""
    alike = {name for layer in FUSED if set(layer) & set(targets) for name in layer}
    return tuple(name for name in LINEAR if name in targets or name in alike)


def engine_processes(shards: int) -> int:
    """Of one generator: the engine computes itself, or has a worker for each shard."""
    return 1 if shards == 1 else 1 + shards


def asleep(parts: Parts) -> Parts:
    """The parts that stay on the card in vLLM's sleep level 1; weights and adapter slots go to host memory, the KV
    cache is dropped (vllm docs, features/sleep_mode), and the allocator gives back what it keeps. For a 0.5B on an H200
    that is 1.65 GB, measured 1.53."""
    return {name: parts[name] for name in ("workspace", "graphs", "context")}


# The KV cache as vLLM cuts it: in blocks of tokens, one of which it keeps for itself. Pure.

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
