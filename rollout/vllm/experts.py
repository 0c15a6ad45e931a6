"""Experts in vLLM. Reads an adapter of experts back from a card's LoRA slots. On vLLM's CPU build: renews its packed
copy of the experts' weights when whole weights are loaded again, reads the copy back, and records to which experts
tokens go.

This was read in vLLM 0.32 (layers/fused_moe: unquantized_fused_moe_method.py, routed_experts.py, experts/cpu_moe.py;
model_loader/reload). RoutedExperts holds a layer's experts in w13_weight [E, 2I, H], gate above up, and w2_weight
[E, H, I]. For a CPU both are padded to a multiple of 32 in I and brought into the order of the kernel, in place of the
weights, when they are loaded for the first time. A later load computes with the weights as they come, in the wrong
order: 5 nats in a tiny Qwen3-MoE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.types import EngineError
from rollout.weights import columns_of

# LoRA on experts, which vLLM has on a card. An adapter has two pairs for a layer's experts (learner.model.experts):
# that of gate and up projection is called experts.base_layer, that of the down projection experts.


class Slots(NamedTuple):
    """What one slot of vLLM's LoRA kernel for a layer's experts holds, in PEFT's layout, E experts of rank r.

    gate_up: A [E r, H] and B [2I, r E]. down: A [E r, I] and B [H, r E]. rest: whatever else in the slot would change
    outputs; 0 elements if nothing would.
    """

    gate_up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    rest: Tensor


def is_of_experts(adapted: Any) -> bool:
    """Whether a layer with LoRA of vLLM's is one of experts."""
    return hasattr(adapted, "w13_lora_a_stacked")


def experts_slots(adapted: Any, slot: int, rank: int) -> Slots | None:
    """Reads a slot of a layer of vLLM's (lora/layers/fused_moe.py); None if the layer is not of experts, or holds a
    part of them.

    rank: the adapter's; 0: the slot must be empty.

    vLLM keeps A and B of gate and up projection as one (gpt-oss, whose rows alternate) or each by itself, and then A
    twice.
    """
    if not is_of_experts(adapted) or adapted.tp_size > 1 or adapted.use_ep:
        return None
    of_a = [stack[slot] for stack in adapted.w13_lora_a_stacked]
    of_b = [stack[slot] for stack in adapted.w13_lora_b_stacked]
    a, b = adapted.w2_lora_a_stacked[0][slot], adapted.w2_lora_b_stacked[0][slot]
    rows = torch.cat(of_b, 1)  # [E, 2I, R]: gate above up
    rest = [columns[..., rank:].flatten() for columns in (rows, b)]
    rest += [(own - of_a[0])[:, :rank].flatten() for own in of_a[1:]]
    if rank:  # without this flag the kernel passes over the slot
        rest.append((adapted.adapter_enabled[slot : slot + 1] == 0).to(rest[0]))
    if not any(number.any() for number in rest):
        rest = []
    return Slots(
        (_rows_of(of_a[0], rank), _columns_of(rows, rank)), (_rows_of(a, rank), _columns_of(b, rank)),
        torch.cat(rest) if rest else torch.empty(0),
    )  # fmt: skip


def _rows_of(a: Tensor, rank: int) -> Tensor:
    """[E r, in], rows by expert, then rank, of a stack [E, R, in]."""
    return a[:, :rank].flatten(0, 1)


def _columns_of(b: Tensor, rank: int) -> Tensor:
    """[out, r E], columns by rank, then expert, of a stack [E, out, R]."""
    return b[..., :rank].permute(1, 2, 0).flatten(1)


def renew_packed_experts() -> None:
    """Has every engine of this process pack the weights of experts after each load, and not after the first alone."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method

    method: Any = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    upstream = method.process_weights_after_loading
    if hasattr(upstream, "gleaner"):
        return

    @wraps(upstream)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        again = self.moe_kernel is not None
        upstream(self, layer)
        if again:
            # The layer's tensors are fresh ones here; vLLM copies them into those that the kernel computes with.
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    process_weights_after_loading.gleaner = True  # type: ignore[attr-defined]
    method.process_weights_after_loading = process_weights_after_loading


ONE = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")  # a tensor of one expert, under the checkpoint's or vLLM's own name


class Expert(NamedTuple):
    """Where a tensor of one expert of the checkpoint is.

    weight: w13_weight or w2_weight, packed, or a bias, of all experts. rows: those of it that the checkpoint's tensor
    is. transposed: whether the checkpoint has them as columns. columns: how many of a row's numbers the checkpoint has;
    the others are padding. isa: name of the kernel that the weight is packed for.
    """

    weight: Tensor
    expert: int
    rows: slice
    columns: int
    transposed: bool
    isa: str

    def read(self, version: int) -> Tensor:
        """What rollout.weights.read_of makes of the checkpoint's tensor, here of the packed one."""
        if self.weight.dim() == 2:
            return self.weight[self.expert, self.rows]
        _, height, width = self.weight.shape
        places = _places(height, width, self.weight.dtype, self.isa).view(height, width)[self.rows, : self.columns]
        places = places.t() if self.transposed else places
        chosen = places[:, columns_of(version, places.shape[1])]
        return self.weight[self.expert].flatten()[chosen.long()] + 0.0  # as columns_read: no -0.0


def expert_of(modules: Mapping[str, Any], name: str) -> Expert | None:
    """Where a tensor of the checkpoint is, if it is one expert's; None if it is not, or not known.

    name: the tensor's name as vLLM's mapper renames it.
    """
    found = ONE.fullmatch(name)
    layer = modules.get(f"{found[1]}.routed_experts") if found else None
    if found is None or layer is None or layer.moe_config.moe_parallel_config.tp_size > 1:
        return None
    kernel: Any = getattr(getattr(layer.quant_method, "moe_kernel", None), "fused_experts", None)
    if not hasattr(kernel, "isa") or kernel._use_zentorch:
        return None
    size = layer.moe_config.intermediate_size_per_partition
    padded, hidden = layer.w2_weight.shape[2], layer.w2_weight.shape[1]
    gate, up, down = (slice(0, size), slice(padded, padded + size), slice(0, hidden))
    known = {
        f"{layer.ckpt_gate_proj_name}.weight": (layer.w13_weight, gate, hidden, False),
        f"{layer.ckpt_up_proj_name}.weight": (layer.w13_weight, up, hidden, False),
        f"{layer.ckpt_down_proj_name}.weight": (layer.w2_weight, down, size, False),
        # vLLM's names in gpt-oss, whose checkpoint has [in, out], and gate and up in alternate columns
        "w13_weight": (layer.w13_weight, slice(0, 2 * size), hidden, True),
        "w2_weight": (layer.w2_weight, down, size, True),
        "w13_bias": (getattr(layer, "w13_bias", None), slice(0, 2 * size), 0, False),
        "w2_bias": (getattr(layer, "w2_bias", None), down, 0, False),
    }
    weight, rows, columns, transposed = known.get(found[3], (None, down, 0, False))
    if weight is None:
        return None
    return Expert(weight, int(found[2]), rows, columns, transposed, kernel.isa)


@lru_cache(maxsize=4)  # a model has two shapes
def _places(height: int, width: int, dtype: torch.dtype, isa: str) -> Tensor:
    """[height * width] int32: at which place of the packed matrix each number of a matrix is.

    The kernel's own packing is asked, by packing the numbers' places. Four digits below 256 are exact in every dtype.
    """
    from vllm._custom_ops import cpu_prepack_moe_weight

    own = torch.arange(height * width, dtype=torch.int32)
    there = torch.zeros(height * width, dtype=torch.int64)
    for shift in (0, 8, 16, 24):
        digit = ((own >> shift) & 255).to(dtype).view(1, height, width)
        there += cpu_prepack_moe_weight(digit, isa).flatten().long() << shift
    places = torch.empty_like(own)
    places[there] = own
    return places


# Which experts the routers choose for each token, as vLLM records it on a card (enable_return_routed_experts): there it
# is done in vLLM's model runner V2, which the CPU build does not have. Here the same hooks are given what they ask for:
# each router tells its choice of a step (BaseRouter), the scheduler asks for the rows of a request, and vLLM's output
# has them for each completion. This was read in vLLM 0.32 (layers/fused_moe/router/base_router.py,
# v1/core/sched/scheduler.py, v1/worker/gpu_model_runner.py).
#
# A choice is kept where the KV cache keeps its token, by the token's slot. So the tokens of a prompt that another
# request has computed have theirs as well.


def record_experts(engine: Any) -> None:
    """Has the completions of an LLMEngine of this process say in `routed_experts` [P + T - 1, layers, k] which experts
    each token went to. To be called once, after the engine is built.

    Raises EngineError for a model whose tokens are not all kept in one group of the KV cache.
    """
    core = engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    core.scheduler.aux_output_connector = _Choices(runner, core.scheduler)


class _Choices:
    """The choices of all tokens in the KV cache. It takes the place of vLLM's AuxOutputSchedulerConnector.

    runner: vLLM's model runner, whose steps it follows.
    """

    def __init__(self, runner: Any, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._group, self._block = _whole_group(runner.kv_cache_config)
        config = runner.vllm_config
        layers, k = config.model_config.get_total_num_hidden_layers(), config.model_config.get_num_experts_per_tok()
        tokens, slots = config.scheduler_config.max_num_batched_tokens, runner.kv_cache_config.num_blocks * self._block
        self._step = torch.full((tokens, layers, k), -1, dtype=torch.int16)
        self._kept: NDArray[np.int16] = np.full((slots, layers, k), -1, np.int16)
        self._told: dict[str, int] = {}  # request -> number of its tokens whose choices were told
        self._follow(runner)

    def _follow(self, runner: Any) -> None:
        layers = [moe for moe in runner.model.modules() if hasattr(moe, "router") and hasattr(moe, "layer_id")]
        if not layers or any(moe.is_monolithic for moe in layers):  # a monolithic kernel asks no router
            raise EngineError(
                "rollout.routing_replay: this model's routers are not asked in a way that can be recorded; leave "
                "routing_replay out"
            )
        for moe in layers:
            moe.router.set_capture_fn(partial(self._chosen, moe.layer_id))
        execute = runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **others: Any) -> Any:
            output = execute(scheduler_output, *args, **others)
            count = scheduler_output.total_num_scheduled_tokens
            slots = runner.input_batch.block_table[self._group].slot_mapping.gpu[:count].numpy()
            self._kept[slots] = self._step[:count].numpy()
            return output

        runner.execute_model = execute_model

    def _chosen(self, layer: int, experts: Tensor) -> None:
        self._step[: len(experts), layer] = experts

    # --- what the scheduler calls ------------------------------------------------------------------------------------

    def take_output(self, request: Any, _output: object) -> NDArray[np.int16]:
        """[tokens, layers, k]: of the tokens of a request that were computed since the last call."""
        start, stop = self._told.get(request.request_id, 0), request.num_tokens - 1
        self._told[request.request_id] = stop
        first = start // self._block
        blocks = np.array(self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[self._group][first:])
        places = np.arange(start, stop)
        slots = blocks[places // self._block - first] * self._block + places % self._block
        return np.asarray(self._kept[slots])

    def build_connector_meta(self, *_: object) -> None:
        """Nothing has to be told to a worker of the same process."""

    def request_finished(self, request: Any) -> None:
        """Forgets a request that has ended. Of one that is preempted the tokens that were told are not told again,
        though they are computed again: vLLM's output has them already."""
        if request.is_finished():
            self._told.pop(request.request_id, None)

    def reset(self) -> None:
        """Choices are overwritten with their slots."""


def _whole_group(cache: Any) -> tuple[int, int]:
    """(number of a group of the KV cache that keeps every token, tokens of a block)."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for number, group in enumerate(cache.kv_cache_groups):
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            return number, int(group.kv_cache_spec.block_size)
    raise EngineError(
        "rollout.routing_replay: the experts of tokens are recorded where the KV cache keeps all of them, and that of "
        "this model has no group of alike layers of full attention; leave routing_replay out"
    )
