"""The memory model of a generator for the planner: what vLLM holds, in bytes, by part, and the size of its KV cache.

The figures are measured, or taken from vLLM's documentation and source; those that are estimates say so. Letters: b
bytes of an element, n weights of an adapter, f feed-forward and h hidden width, V vocabulary.
"""

from dataclasses import dataclass
from math import ceil

from cluster.memory.layers import Layer
from cluster.memory.learner import GENERATOR_COPIES, SHARDS_COPIES
from cluster.memory.shape import ALL, ATTENTION, DTYPE_BYTES, EXPERTS, Base, Parts, Shape, base_bytes

# On a GPU: measured on an H200 with vLLM 0.32 in bfloat16, as the process's memory in nvidia-smi less that of its
# tensors (benchmarks/results/gpu_h200.md). CUDA context and kernels take 0.81 GB (1B, 8B) and CUDA graphs 17.3 and
# 17.8 MB per layer; the allocator keeps 0.04 GB (0.5B), 0.55 (8B) and 0.69 (1B) beyond the tensors of a step.
ENGINE_CONTEXT = 800 * 10**6
GRAPHS_OF_LAYER = 18 * 10**6
KEPT = 700 * 10**6
# On a CPU: the process before it has a model, measured as in cluster.memory.learner. The memory that malloc keeps grows
# ever more slowly: with local_cpu.yaml 0.9 GB at first, 1.1 after 30 steps, 1.3 after 60.
ENGINE_PROCESS = 1050 * 10**6
FUSED = (  # modules that vLLM computes as one layer
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
    ("w1", "w3"),
)
PREFILL_TOKENS = 4096  # tokens of an engine step (set by rollout.vllm.convert); they bound the activations of prefill


@dataclass(frozen=True, slots=True)
class Serving:
    """The settings of a generator that its memory depends on."""

    dtype: str = "bfloat16"
    base: Base = "none"
    rank: int = 16
    adapters: int = 2  # policy versions held at the same time; 0 where a push replaces whole weights
    pushed: int = 0  # bytes of the weights that a push replaces
    sequences: int = 128  # decoded at the same time
    kv_bytes: int = 0  # size of the KV cache
    targets: tuple[str, ...] = ALL
    cuda: bool = True
    longest: int = 0  # tokens of the longest prompt with its completion
    shards: int = 1  # processes over which the model is spread (tensor parallelism), each with a GPU


def generator_bytes(shape: Shape, serving: Serving) -> Parts:
    """The bytes that vLLM holds while it generates, by part: on one GPU, or on a CPU of all its processes.

    weights: the base, of each shard an even share; nf4 with float32 scales. kv_cache: vLLM's kv_cache_memory_bytes.
    lora_slots: b n (on a CPU 4 n) per policy version, in vLLM's max_loras buffers of the highest rank; n counts the
      adapted matrices and those that vLLM computes as one layer with them; with experts all of the attention, and A of
      their gate and up projection twice (gpt-oss's once). On a CPU a bfloat16 model has packed copies
      (rollout.vllm.cpu) of the same size on top, which are padded to rank 16 at least.
    workspace: activations of an engine step of up to 4096 tokens, b (2 f + 4 h) per token (f / shards in a shard), and
      16 V per sequence for float32 logits and sampling (estimate). Experts take, for each of those that a token goes
      to, b (f + max(2 f, h)) in place of 2 b f (fused_moe's two buffers; estimate).
    graphs: CUDA graphs; none on a CPU. fragmentation: what the allocator keeps on a GPU. context: of the processes.
    push: on a CPU, whole weights that arrive (cluster.memory.learner). On CUDA they arrive layer by layer between two
      engine steps, and are not counted.

    With nf4, bitsandbytes dequantises a matrix for a product with many tokens (backends/cuda/ops.py: always beyond
    1536, on some GPUs from 5 on), and vLLM's plugin copies the product to its place. So workspace has the largest
    matrix in 16 bits and f more elements per token, and graphs have such a matrix too. The kernels of the other formats
    unpack as they multiply, and take nothing (estimate).
    """
    b = DTYPE_BYTES[serving.dtype]
    # On a CPU the prefill of a prompt is not split.
    tokens = max(PREFILL_TOKENS, serving.sequences, 0 if serving.cuda else serving.longest)
    in_4_bits = serving.base == "nf4"
    matrix = in_4_bits * b * shape.largest
    shards, processes = serving.shards, engine_processes(serving.shards)
    widest = max(_feed_elements(layer, shape.hidden, in_4_bits=in_4_bits) for _, layer in shape.stacks)
    activations = tokens * b * (widest // shards + 4 * shape.hidden)
    graphs = GRAPHS_OF_LAYER * shape.layers + matrix
    copies = GENERATOR_COPIES + (SHARDS_COPIES + shards - 1 if shards > 1 else 0)  # each further process: vLLM's
    extra = {"graphs": graphs, "fragmentation": KEPT} if serving.cuda else {"push": copies * serving.pushed}
    here = 1 if serving.cuda else shards  # shards that share this memory
    rank = 8 if 1 < serving.rank < 8 else serving.rank  # vLLM's buffers have rank 1, or 8 and more
    of_experts = serving.cuda and EXPERTS in serving.targets
    targets = in_one((*ATTENTION, EXPERTS) if of_experts else serving.targets)
    slots = (b if serving.cuda else 4) * shape.lora_params(rank, targets, shards)
    if of_experts and shape.kind != "gpt_oss":
        experts = sum(count * layer.feed.experts.count for count, layer in shape.stacks if layer.feed.experts)
        slots += b * rank * shape.hidden * experts
    if not serving.cuda and serving.dtype == "bfloat16":
        slots += 4 * shape.lora_params(max(rank, 16), targets, shards)
    return {
        "weights": here * base_bytes(shape, serving.base, b, nested=False) // shards,
        "kv_cache": here * serving.kv_bytes // shards,
        "lora_slots": here * serving.adapters * slots,
        "workspace": here * (activations + matrix + 16 * serving.sequences * shape.vocab),
        **extra,
        "context": ENGINE_CONTEXT if serving.cuda else processes * ENGINE_PROCESS,
    }


def in_one(targets: tuple[str, ...]) -> tuple[str, ...]:
    """The targets, with the modules that vLLM fuses with them (vllm/lora/layers/column_parallel_linear.py)."""
    alike = (name for layer in FUSED if set(layer) & set(targets) for name in layer)
    return tuple(dict.fromkeys((*targets, *alike)))


def _feed_elements(layer: Layer, hidden: int, *, in_4_bits: bool) -> int:
    """Elements of activations per token of a feed-forward block."""
    experts = layer.feed.experts
    chosen = 0 if experts is None else experts.chosen * (experts.ffn + max(2 * experts.ffn, hidden))
    return (3 if in_4_bits else 2) * layer.feed.ffn + chosen


def engine_processes(shards: int) -> int:
    """How many processes a generator has: one, or with several shards the engine and a worker for each shard."""
    return 1 if shards == 1 else 1 + shards


def asleep(parts: Parts) -> Parts:
    """The parts that stay on the GPU in vLLM's sleep level 1: weights and adapter slots move to host memory, the KV
    cache is dropped (vllm docs, features/sleep_mode), and the allocator frees what it keeps. For a 0.5B on an H200 they
    are 1.65 GB; measured were 1.53."""
    return {name: parts[name] for name in ("workspace", "graphs", "context")}


# The KV cache, which vLLM divides into blocks of tokens; it keeps one block for itself.

ELEMENT_BYTES = DTYPE_BYTES | {"fp8": 1}
STATES = 2  # of a sequence that vLLM holds where it caches prefixes, which it does on CUDA (mamba_cache_mode: align)
BLOCK, BLOCK_CPU = 16, 32  # tokens: vLLM's default on CUDA, and what rollout.vllm.convert sets on a CPU


def cache_bytes(shape: Shape, dtype: str, tokens: int, count: int, *, cuda: bool) -> int:
    """Bytes of a KV cache that holds `count` sequences of `tokens` tokens at the same time, at least 1 MiB."""
    blocks, size = _blocks(shape, dtype, tokens, cuda)
    return max((count * blocks + 1) * size, 2**20)


def cached_sequences(shape: Shape, dtype: str, tokens: int, kv_bytes: int, *, cuda: bool) -> int:
    """How many sequences of `tokens` tokens a KV cache of `kv_bytes` holds at the same time. With 0 vLLM would not
    start."""
    blocks, size = _blocks(shape, dtype, tokens, cuda)
    return max(kv_bytes // size - 1, 0) // blocks


def _blocks(shape: Shape, dtype: str, tokens: int, cuda: bool) -> tuple[int, int]:
    """(blocks of one sequence, bytes of a block).

    vLLM forms groups of equally many layers of one kind (attention to all tokens, with a window, with a state), pads
    the last group, and gives each group blocks of its own (v1/core/kv_cache_utils.py). All layers have pages of the
    same bytes: where a token takes fewer, a page has more tokens, and pages of attention are at least as large as a
    state (platforms/interface.py).
    """
    block = BLOCK if cuda else BLOCK_CPU
    kinds = [(count, layer) for count, layer in shape.stacks if _cached(layer, dtype) or _state_bytes(layer, dtype)]
    widest = max((_cached(layer, dtype) for _, layer in kinds), default=0)
    state = max(_state_bytes(layer, dtype) for _, layer in kinds)
    page = block * widest * max(ceil(state / (block * widest)), 1)
    needs: dict[tuple[int, int, int], int] = {}  # layers by what a token takes, the window, and the state
    for count, layer in kinds:
        kind = _cached(layer, dtype), layer.mixer.window, _state_bytes(layer, dtype)
        needs[kind] = needs.get(kind, 0) + count
    counts = needs.values()
    layers = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    blocks = 0
    for (size, window, _), count in needs.items():
        each = _kept(window, tokens, page // size, cuda) if size else STATES if cuda else 1
        blocks += ceil(count / layers) * each
    return blocks, page * layers


def _kept(window: int, tokens: int, page: int, cuda: bool) -> int:
    """Pages of one sequence in a layer of attention. A window may begin in the middle of a page, and also keeps the
    tokens that are scheduled: two engine steps, on a CPU all tokens."""
    if not window:
        return ceil(tokens / page)
    return ceil((min(window + 2 * PREFILL_TOKENS, tokens) if cuda else tokens) / page) + 1


def _cached(layer: Layer, dtype: str) -> int:
    """Bytes of the keys and values of one token in a layer; 0 if the layer has none of its own."""
    return 2 * layer.mixer.keys * ELEMENT_BYTES[dtype] if layer.mixer.cached else 0


def _state_bytes(layer: Layer, dtype: str) -> int:
    """Bytes of the state of one sequence in a layer: the convolution's inputs in the model's type (counted as that of
    the KV cache, 16 bits with fp8), and the matrices of linear attention in float32. Qwen3.5 sets that type
    (mamba_ssm_dtype); for other models it is an upper bound."""
    return layer.mixer.convolved * max(ELEMENT_BYTES[dtype], 2) + 4 * layer.mixer.recurrent


def kv_token_bytes(shape: Shape, dtype: str) -> int:
    """Bytes of the keys and values of one token in all layers that cache them."""
    return sum(count * _cached(layer, dtype) for count, layer in shape.stacks)


def state_bytes(shape: Shape, dtype: str) -> int:
    """Bytes of the states of one sequence in all layers that carry one."""
    return sum(count * _state_bytes(layer, dtype) for count, layer in shape.stacks)
