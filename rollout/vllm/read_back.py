"""Reads the policy back from the tensors that vLLM computes with: the slots of its LoRA kernels, or its weights. Also
starts and ends the worker processes of an engine whose model is spread over several shards.

Only the engine's own thread calls held_by, between two steps. The functions below it run in vLLM's workers: one worker
in this process, or one process for each shard, which then all read at the same time. They rely on what was read in vLLM
0.32 (lora/layers, layers/utils.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import all_reduce

from cluster.child import end_with_parent
from cluster.telemetry import peak_memory
from rollout.types import Held
from rollout.vllm.convert import Resident
from rollout.vllm.cpu import forget_packed
from rollout.vllm.experts import Expert, expert_of, experts_slots, is_of_experts
from rollout.weights import columns_of, columns_read, digests_of, in_pairs, turned_heads

# A model spread over several worker processes, each with a device of its own: vLLM's tensor parallelism.
#
# The engine stays in the generator's process. Each worker holds a shard: the rows of a layer that is split by its
# outputs, the columns of a layer that is split by its inputs (Megatron-LM, Shoeybi et al. 2019, section 3). Of an
# adapter on such a layer, B is split with the rows or A with the columns, and the other matrix is whole in each worker
# (S-LoRA, Sheng et al. 2023, section 6). If one worker ends, vLLM ends the others, and all calls of the engine fail.

SHARED_NAME = "VLLM_DIST_IDENT"  # environment variable of vLLM's workers on a CPU: prefix of their shared memory
THREADS, WARNINGS, TORCH_LOGS = "OMP_NUM_THREADS", "PYTHONWARNINGS", "TORCH_LOGS"
# vLLM on a CPU sets LD_PRELOAD (libgomp, tcmalloc). Reward processes would inherit it from this process, and with it
# tcmalloc's large reservations.
FOR_WORKERS = (THREADS, WARNINGS, TORCH_LOGS, "LD_PRELOAD")
# Python's resource tracker, which removes the shared memory of killed workers, warns of each piece.
QUIET_TRACKER = "ignore::UserWarning:multiprocessing.resource_tracker"
QUIET_TORCH = "-torch._library.triton"  # torch warns of the missing Triton on a CPU


def shard_arguments(shards: int, *, cuda: bool) -> dict[str, Any]:
    """Keyword arguments of vllm.EngineArgs for an engine with several shards."""
    arguments: dict[str, Any] = {"tensor_parallel_size": shards, "distributed_executor_backend": "mp"}
    return arguments if cuda else arguments | {"worker_cls": "rollout.vllm.shard.Shard"}


@contextmanager
def workers_environment(shards: int) -> Iterator[None]:
    """The environment in which vLLM builds an engine with shards and starts its workers, which inherit it.

    Each worker gets its share of this process's compute threads. Afterwards the variables are what they were before.
    """
    own = {name: os.environ.get(name) for name in FOR_WORKERS}
    if shards > 1:
        os.environ[THREADS] = str(max(1, int(own[THREADS] or 1) // shards))
        os.environ[WARNINGS] = ",".join(filter(None, [own[WARNINGS], QUIET_TRACKER]))
        os.environ.setdefault(TORCH_LOGS, QUIET_TORCH)
    try:
        yield
    finally:
        for name, value in own.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def settle_ends(engine: Any) -> None:
    """Has the workers end as soon as the engine ends. To be called once, after the engine is built.

    The workers are killed with this process, even if they are stopped or hang; vLLM relies on a thread in each worker
    that reads a pipe. When the engine is closed they exit at once, since they hold nothing but memory and vLLM's
    clean-up takes seconds for each. So that no shared memory is left, its names are removed now, when all workers have
    opened it.
    """
    engine.collective_rpc(_settle_end, args=(os.getpid(),))
    executor = engine.model_executor
    for queue in (executor.rpc_broadcast_mq, *executor.response_mqs):
        _forget_name(queue)


def lost_shard(engine: Any, shards: int) -> str:
    """The cause of an engine's end as a clause, if one of its processes ended; else ""."""
    executor = engine.model_executor
    if shards == 1 or not executor.is_failed:
        return ""
    return f"the end of one of its {shards} processes (killed, or the machine is out of memory)"


def _settle_end(worker: Any, parent: int) -> None:
    if not end_with_parent(parent):
        os._exit(1)
    worker.shutdown = partial(os._exit, 0)
    if name := os.environ.get(SHARED_NAME):
        for memory in Path("/dev/shm").glob(f"{name}*"):
            memory.unlink(missing_ok=True)
    from vllm.distributed import get_tp_group

    queue: Any = get_tp_group().mq_broadcaster
    if queue.buffer.is_creator:
        _forget_name(queue)


def _forget_name(queue: Any) -> None:
    """Unlinks the shared memory of one of vLLM's queues; the processes that have it open keep it."""
    queue.buffer.shared_memory.unlink()
    queue.buffer.is_creator = False  # the creator would unlink it again at its end


def peak_of(engine: Any) -> float:
    """See Engine.peak_memory."""
    found: list[tuple[bool, float]] = engine.collective_rpc(_peak)
    on_cards = [peak for on_card, peak in found if on_card]
    return max(on_cards) if on_cards else peak_memory() + sum(peak for _, peak in found)


def _peak(_worker: Any) -> tuple[bool, float]:
    return torch.cuda.is_available(), peak_memory()


def whole_pair(layer: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A [rank, in] and B [out, rank] of an adapted layer, gathered from all shards. a, b: what this worker holds.

    All workers must call this for the same layers in the same order.
    """
    if layer.tp_size == 1:
        return a, b
    from vllm.distributed import tensor_model_parallel_all_gather as gather
    from vllm.lora.layers import ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA

    if isinstance(layer, RowParallelLinearWithLoRA):
        return gather(a.contiguous(), 1), b
    if not isinstance(layer, ColumnParallelLinearWithLoRA):  # the layer is whole in each worker
        return a, b
    sizes: Any = layer.base_layer.output_partition_sizes  # one size for each of the layers that are fused in this one
    fused_by_checkpoint = len(layer.lora_b_stacked) == 1
    parts = torch.split(b, sizes) if fused_by_checkpoint else (b,)
    return a, torch.cat([gather(rows.contiguous(), 0) for rows in parts])


def agreed(found: list[Held]) -> Held:
    """The answer in which all workers agree. A tensor whose digest differs between workers gets an invalid digest."""
    first, *others = found
    apart = {name for held in others for name in first.tensors if held.tensors.get(name) != first.tensors[name]}
    extra = {name for held in others for name in held.tensors.keys() - first.tensors.keys()}
    return Held(first.tensors | dict.fromkeys(apart | extra, "differs between shards"), first.unread)


# Which part of each weight a worker holds, when the model is spread over several. This was read in vLLM 0.32
# (layers/linear.py, layers/vocab_parallel_embedding.py).


class Spread(NamedTuple):
    """Which rows and columns of a whole weight [height, width] this worker holds.

    rows: [R] int64, indices of the rows. column: index of the first column.
    """

    rows: Tensor
    height: int
    width: int
    column: int = 0

    def whole(self, values: Tensor, places: Tensor, count: int) -> Tensor:
        """[height, count] columns of the whole weight in host memory, gathered from all workers.

        values: [R, C], what this worker has of them. places: [C] int64, index of each of its columns in the result. All
        workers must call this for the same weights in the same order.
        """
        from vllm.distributed import get_tp_group

        whole = torch.zeros(self.height, count, dtype=values.dtype)
        whole[self.rows[:, None], places] = values.cpu()
        # Each byte comes from one worker and is zero in all others, so the sum is exactly that worker's byte.
        all_reduce(whole.view(torch.uint8), group=get_tp_group().cpu_group)
        return whole


class Place(NamedTuple):
    """Where a worker holds a weight or bias of the checkpoint.

    module: vLLM's module, in which several layers of the checkpoint may be fused. here: rows of the module's weight.
    spread: which part of the whole weight these rows are; None if they are all of it.
    """

    module: Any
    here: slice
    spread: Spread | None = None

    def bias(self) -> Tensor:
        """[out] bias of the whole layer."""
        own: Tensor = self.module.bias[self.here].to(self.module.weight.dtype)  # float32 for some CPU kernels
        if self.spread is None:
            return own
        return self.spread.whole(own[:, None], torch.zeros(1, dtype=torch.int64), 1)[:, 0]

    def columns(self, version: int, width: int, read: Callable[[Tensor], Tensor]) -> Tensor:
        """[out, COLUMNS]: the columns of the whole weight that columns_of chooses.

        width: columns of the module's weight in this worker. read: [C] column indices -> these columns of the module's
        weight, all of its rows.
        """
        if self.spread is None:
            return read(columns_of(version, width))[self.here]
        chosen = columns_of(version, self.spread.width) - self.spread.column
        found = (chosen >= 0) & (chosen < width)
        own = self.module.weight.new_empty(len(self.spread.rows), 0)  # for a worker that has none of the columns
        if found.any():
            own = read(chosen[found])[self.here]
        return self.spread.whole(own, found.nonzero()[:, 0], len(chosen))


def place_of(module: Any, kind: str, part: int | None) -> Place | None:
    """The place of a weight or bias (`kind`) of the checkpoint in a module of vLLM; None if it is not known.

    part: index of the checkpoint's layer among the layers fused in the module; None if the module is that layer.
    """
    sizes = getattr(module, "output_partition_sizes", ())
    first = sum(sizes[:part]) if part else 0
    here = slice(first, getattr(module, "org_vocab_size", None) if part is None else first + sizes[part])
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    if get_tp_group().world_size == 1 or getattr(module, "tp_size", 0) == 1:
        return Place(module, here)
    if not hasattr(module, "tp_size"):  # a norm, equal in all workers; a norm over divided heads is a matrix
        return Place(module, here) if module.weight.dim() == 1 else None
    kind_of_module = type(module)
    if kind_of_module in (vocab_parallel_embedding.VocabParallelEmbedding, vocab_parallel_embedding.ParallelLMHead):
        spread = _of_vocabulary(module)
        return Place(module, slice(0, len(spread.rows)), spread)
    if kind_of_module is linear.RowParallelLinear:
        return Place(module, here, _by_inputs(module) if kind == "weight" else None)
    if kind_of_module in (linear.ColumnParallelLinear, linear.MergedColumnParallelLinear, linear.QKVParallelLinear):
        return Place(module, here, _by_outputs(module, range(len(sizes)) if part is None else [part]))
    return Place(module, here) if kind_of_module is linear.ReplicatedLinear else None


def _of_vocabulary(embedding: Any) -> Spread:
    vocabulary = embedding.shard_indices
    rows = torch.arange(vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index)
    return Spread(rows, embedding.org_vocab_size, embedding.embedding_dim)


def _by_inputs(divided: Any) -> Spread:
    """The part of a layer whose inputs are divided among the workers."""
    column = divided.tp_rank * divided.input_size_per_partition
    return Spread(torch.arange(divided.output_size), divided.output_size, divided.input_size, column)


def _by_outputs(divided: Any, parts: Iterable[int]) -> Spread:
    """The part of a layer whose outputs are divided among the workers, each fused part by itself. Workers share no key
    or value head (rollout.architecture.check_shards)."""
    rows, height = [], 0
    for part in parts:
        size = divided.output_partition_sizes[part]
        rows.append(height + divided.tp_rank * size + torch.arange(size))
        height += size * divided.tp_size
    return Spread(torch.cat(rows), height, divided.input_size)


Named = Iterator[tuple[str, Tensor]]


def held_by(engine: Any, newest: Resident, adapters: bool) -> Held:
    """The newest policy as the engine holds it, an adapter or whole weights; tensors that it lacks are left out.

    This costs a copy and a digest of each tensor. Where vLLM has repacked weights for a CPU, it also costs as much as a
    prompt of COLUMNS tokens.
    """
    if not adapters:
        return agreed(engine.collective_rpc(_weights, args=(newest,)))
    return agreed(engine.collective_rpc(_adapter, args=(newest, engine.vllm_config.model_config.dtype)))


def _adapter(worker: Any, newest: Resident, dtype: torch.dtype) -> Held:
    """Runs in a worker: reads an adapter back. dtype: the model's, in which adapters are sent, since LoRA slots on a
    CPU are float32 (rollout.vllm.cpu)."""
    manager = worker.model_runner.lora_manager._adapter_manager
    if newest.lora_id not in manager.lora_index_to_id:
        return Held({})
    slot = manager.lora_index_to_id.index(newest.lora_id)
    keys = _keys_by_module(manager.model, newest.keys)
    tensors = digests_of((name, tensor.to(dtype)) for name, tensor in _slots(manager, slot, keys, newest.rank))
    known = {key for module in _adapted(manager, linear=False) for key in keys.get(module, {}).values()}
    return Held(tensors, tuple(sorted(known - tensors.keys())))


def unplaced(engine: Any, adapter: Resident) -> list[str]:
    """Those tensors of an adapter, by name, for whose layer vLLM has no LoRA kernel; it would leave them out."""
    (*_, found) = engine.collective_rpc(_unplaced, args=(adapter.keys,))
    return sorted(found)


def _unplaced(worker: Any, keys: frozenset[str]) -> set[str]:
    manager = worker.model_runner.lora_manager._adapter_manager
    adapted, by_module = _adapted(manager), _keys_by_module(manager.model, keys)
    return {key for module, pair in by_module.items() if module not in adapted for key in pair.values()}


def _adapted(manager: Any, *, linear: bool = True) -> set[str]:
    """vLLM's names, before fusion, of all layers that have a LoRA kernel. linear: linear layers are among them."""
    found: set[str] = set()
    for name, layer in manager.modules.items():
        if linear or not _is_linear(layer):
            found.update(manager.packed_modules.get(name, [name]))
        if is_of_experts(layer):
            found.update(_pairs_of_experts(name))
    return found


def _pairs_of_experts(name: str) -> tuple[str, str]:
    """The names of the pairs of gate and up projection, and of the down projection, of the experts `name`. The second
    is that of the module."""
    return f"{name}.base_layer", name


def _keys_by_module(model: Any, keys: frozenset[str]) -> dict[str, dict[bool, str]]:
    """Maps vLLM's name of a module before fusion to {True: PEFT's name of its A, False: PEFT's name of its B}."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    found: dict[str, dict[bool, str]] = {}
    for key in keys:
        module, is_a = parse_fine_tuned_lora_name(key, _renames(model))
        found.setdefault(module, {})[is_a] = key
    return found


def _slots(manager: Any, slot: int, keys: dict[str, dict[bool, str]], rank: int) -> Named:
    """Each tensor of the adapter in its slot, and under a name of its own whatever else there would change outputs."""
    for name, layer in manager.modules.items():
        if not _is_linear(layer):
            yield from _slots_of_experts(name, layer, slot, keys, rank)
            continue
        forget_packed(layer.lora_a_stacked)  # so that later products use the very values that are read here
        parts = manager.packed_modules.get(name, [name])
        for part, stack_a, stacks_b in _by_part(parts, layer):
            a, slices, used = stack_a[slot, 0], [stack[slot, 0] for stack in stacks_b], rank if part in keys else 0
            if part in keys:
                pairs = [whole_pair(layer, a[:rank], b[:, :rank]) for b in slices]
                yield keys[part][True], pairs[0][0]
                yield keys[part][False], torch.cat([b for _, b in pairs])
            rest = torch.cat([b[:, used:] for b in slices])
            if used < len(a) and a[used:].any() and rest.any():  # vLLM zeroes a slot before it fills it
                yield f"{part} beyond what was sent", rest


def _slots_of_experts(name: str, layer: Any, slot: int, keys: dict[str, dict[bool, str]], rank: int) -> Named:
    """What `_slots` yields of a layer of experts; nothing of a layer that cannot be read."""
    pairs = [keys.get(one) for one in _pairs_of_experts(name)]
    found = experts_slots(layer, slot, rank if all(pairs) else 0)
    if found is None:
        return
    for pair, halves in zip(pairs, (found.gate_up, found.down), strict=True):
        if pair:
            yield pair[True], halves[0]
            yield pair[False], halves[1]
    if found.rest.numel():
        yield f"{name} beyond what was sent", found.rest


def _by_part(parts: Sequence[str], layer: Any) -> Iterator[tuple[str, Tensor, Sequence[Tensor]]]:
    """Each layer that is fused in this one, with its slots for A, and for B by slices. The first may be several slices
    with the same A, as Qwen3.5's in_proj_qkv is three of the four slices of in_proj_qkvz."""
    of_a, of_b = layer.lora_a_stacked, layer.lora_b_stacked
    first = len(of_a) - len(parts) + 1  # slices of the first
    yield parts[0], of_a[0], of_b[:first]
    yield from ((part, a, (b,)) for part, a, b in zip(parts[1:], of_a[first:], of_b[first:], strict=True))


def _is_linear(layer: Any) -> bool:
    """Whether the layer's LoRA slots are pairs (A [slots, 1, rank, in], B [slots, 1, out, rank]), one for each layer
    fused in it. Experts have other slots (rollout.vllm.experts.Slots), as have embedding and head, which gleaner's
    adapters do not change."""
    stacks = getattr(layer, "lora_a_stacked", None)
    return isinstance(stacks, tuple) and all(stack.dim() == 4 and stack.shape[1] == 1 for stack in stacks)


def _weights(worker: Any, newest: Resident) -> Held:
    model = worker.model_runner.get_model()
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {key: _find(model, modules, key) for key in sorted(newest.keys)}  # sorted, so that all workers agree
    tensors = digests_of(
        (name, _as_sent(model, name, tensor))
        for key, place in found.items()
        if place
        for name, tensor in _values(model, key, place, newest.version)
    )
    return Held(tensors, tuple(key for key, place in found.items() if place is None))


def _find(model: Any, modules: dict[str, Any], key: str) -> Place | Expert | None:
    """Where a weight of the checkpoint is; None if it is not known."""
    renames = _renames(model)
    name: str = renames.apply_list([key])[0] if renames else key
    if (expert := expert_of(modules, name)) is not None:
        return expert
    path, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    if path in modules:
        return place_of(modules[path], kind, None)
    parent, _, part = path.rpartition(".")
    for fused, parts in model.packed_modules_mapping.items():
        module = modules.get(f"{parent}.{fused}")
        if part in parts and len(getattr(module, "output_sizes", ())) == len(parts):
            return place_of(module, kind, parts.index(part))
    return None


def _values(model: Any, key: str, place: Place | Expert, version: int) -> Named:
    if isinstance(place, Expert):
        yield key, place.read(version)
        return
    module, weight = place.module, place.module.weight
    if key.endswith(".bias"):
        yield key, place.bias()
        return
    if weight.numel() == 0:  # vLLM has kept only the copy that it repacked for a CPU
        yield key, place.columns(version, _width(module), partial(_product, module))
        return
    if weight.dim() != 2:
        yield key, weight[place.here]
        return
    tied = bool(model.config.tie_word_embeddings) and key.endswith("embed_tokens.weight")
    head: Any = getattr(model, "lm_head", module if tied else None)  # in some models the embedding is the head
    width, of_head = weight.shape[1], None
    if hasattr(head, "cpu_linear") and (tied or module is head):  # the head has a repacked copy beside its weight
        of_head = place.columns(version, width, partial(_product, head))
    if of_head is not None and not tied:
        yield key, of_head
        return
    own = place.columns(version, width, partial(columns_read, weight))
    yield key, own
    if of_head is not None and not torch.equal(own, of_head):
        yield "lm_head.weight", of_head


def _as_sent(model: Any, name: str, tensor: Tensor) -> Tensor:
    """What was read of a tensor of the checkpoint, with its rows in the checkpoint's order."""
    *_, layer, kind = name.split(".")
    heads = turned_heads(model.config, layer) if kind == "weight" else 0
    return in_pairs(tensor, heads) if heads else tensor


def _product(module: Any, columns: Tensor) -> Tensor:
    """[rows, C]: columns of the weight in a CPU kernel's repacked copy, read by products with unit vectors. These are
    exact, since each sum has one term that is not zero."""
    weight = module.weight
    units = torch.zeros(len(columns), weight.shape[1] if weight.numel() else _width(module), dtype=weight.dtype)
    units[torch.arange(len(columns)), columns] = 1
    product: Tensor = module.cpu_linear(units, weight, None)
    return product.T


def _width(module: Any) -> int:
    """How many of a linear layer's inputs this worker has."""
    return int(getattr(module, "input_size_per_partition", module.input_size))


def _renames(model: Any) -> Any:
    """vLLM's mapper from the checkpoint's names to its own, before fusion; None if the names are the same."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()
