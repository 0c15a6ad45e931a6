"""The policy read back from what vLLM computes with: the slots of its LoRA kernels, or its weights.

Only the engine's own thread calls held_by, between two steps. The functions under it run in vLLM's workers: one in this
process, or one in a process of its own for each shard, which then all read at the same time. Read in vLLM 0.32
(lora/layers, layers/utils.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout.tensor_digests import columns_read, digests_of
from rollout.types import Held
from rollout.vllm.adapter_cache import Resident
from rollout.vllm.cpu.lora import forget_packed
from rollout.vllm.shards import agreed, whole_pair
from rollout.vllm.weight_shards import Place, place_of

Named = Iterator[tuple[str, Tensor]]


def held_by(engine: Any, newest: Resident, adapters: bool) -> Held:
    """The newest policy as the engine holds it, an adapter or whole weights; tensors that it lacks are left out.

    It costs a copy and a digest of each tensor, and where vLLM repacked weights for a CPU a prompt of COLUMNS tokens.
    """
    if not adapters:
        return agreed(engine.collective_rpc(_weights, args=(newest,)))
    return agreed(engine.collective_rpc(_adapter, args=(newest, engine.vllm_config.model_config.dtype)))


def _adapter(worker: Any, newest: Resident, dtype: torch.dtype) -> Held:
    """dtype: the model's, in which adapters are sent; a CPU's slots are float32 (rollout.vllm.cpu.lora)."""
    manager = worker.model_runner.lora_manager._adapter_manager
    if newest.lora_id not in manager.lora_index_to_id:
        return Held({})
    slot = manager.lora_index_to_id.index(newest.lora_id)
    keys = _keys_by_module(manager.model, newest.keys)
    tensors = digests_of((name, tensor.to(dtype)) for name, tensor in _slots(manager, slot, keys, newest.rank))
    unread = {
        key
        for name, layer in manager.modules.items()
        if not _is_linear(layer)
        for module in manager.packed_modules.get(name, [name])
        for key in keys.get(module, {}).values()
    }
    return Held(tensors, tuple(sorted(unread)))


def _keys_by_module(model: Any, keys: frozenset[str]) -> dict[str, dict[bool, str]]:
    """vLLM's name of a module, before it fuses some -> whether it is A -> PEFT's name of the tensor."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    found: dict[str, dict[bool, str]] = {}
    for key in keys:
        module, is_a = parse_fine_tuned_lora_name(key, _renames(model))
        found.setdefault(module, {})[is_a] = key
    return found


def _slots(manager: Any, slot: int, keys: dict[str, dict[bool, str]], rank: int) -> Named:
    """Each tensor of the adapter; and, under vLLM's name, whatever else in its slot would change the output."""
    for name, layer in manager.modules.items():
        if not _is_linear(layer):
            continue
        forget_packed(layer.lora_a_stacked)  # so that products are of what is read here
        parts = manager.packed_modules.get(name, [name])
        for part, stack_a, stack_b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
            a, b, used = stack_a[slot, 0], stack_b[slot, 0], rank if part in keys else 0
            if part in keys:
                whole_a, whole_b = whole_pair(layer, a[:rank], b[:, :rank])
                yield keys[part][True], whole_a
                yield keys[part][False], whole_b
            if used < len(a) and a[used:].any() and b[:, used:].any():  # vLLM zeroes a slot before it fills it
                yield f"{part} beyond what was sent", b[:, used:]


def _is_linear(layer: Any) -> bool:
    """Whether its slots are pairs (A [slots, 1, rank, in], B [slots, 1, out, rank]), one for each layer fused in it.
    Fused experts have others; so have embedding and head, which no adapter of ours touches."""
    stacks = getattr(layer, "lora_a_stacked", None)
    return isinstance(stacks, tuple) and all(stack.dim() == 4 and stack.shape[1] == 1 for stack in stacks)


def _weights(worker: Any, newest: Resident) -> Held:
    model = worker.model_runner.get_model()
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {key: _find(model, modules, key) for key in sorted(newest.keys)}  # one order in all workers
    tensors = digests_of(
        item for key, place in found.items() if place for item in _values(model, key, place, newest.version)
    )
    return Held(tensors, tuple(key for key, place in found.items() if place is None))


def _find(model: Any, modules: dict[str, Any], key: str) -> Place | None:
    """Where a weight of the checkpoint is; None if it is not known."""
    renames = _renames(model)
    path, _, kind = (renames.apply_list([key])[0] if renames else key).rpartition(".")
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


def _values(model: Any, key: str, place: Place, version: int) -> Named:
    module, weight = place.module, place.module.weight
    if key.endswith(".bias"):
        yield key, place.bias()
        return
    if weight.numel() == 0:  # vLLM has nothing but the copy that it repacked for a CPU
        yield key, place.columns(version, _width(module), partial(_product, module))
        return
    if weight.dim() != 2:
        yield key, weight[place.here]
        return
    tied = bool(model.config.tie_word_embeddings) and key.endswith("embed_tokens.weight")
    head: Any = getattr(model, "lm_head", module if tied else None)  # some models have no head but the embedding
    width, of_head = weight.shape[1], None
    if hasattr(head, "cpu_linear") and (tied or module is head):  # it was repacked, and kept what it was made from
        of_head = place.columns(version, width, partial(_product, head))
    if of_head is not None and not tied:
        yield key, of_head
        return
    own = place.columns(version, width, partial(columns_read, weight))
    yield key, own
    if of_head is not None and not torch.equal(own, of_head):
        yield "lm_head.weight", of_head


def _product(module: Any, columns: Tensor) -> Tensor:
    """[rows, C] of what a kernel holds. A product with unit vectors is exact: each sum has one term that is not
    zero."""
    weight = module.weight
    units = torch.zeros(len(columns), weight.shape[1] if weight.numel() else _width(module), dtype=weight.dtype)
    units[torch.arange(len(columns)), columns] = 1
    product: Tensor = module.cpu_linear(units, weight, None)
    return product.T


def _width(module: Any) -> int:
    """Inputs of a linear layer, as many as this worker has of them."""
    return int(getattr(module, "input_size_per_partition", module.input_size))


def _renames(model: Any) -> Any:
    """vLLM's names for those of the checkpoint, without its fusions; None if they are the same."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    # The first is vLLM 0.32's name of it, the second 0.26's.
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()
