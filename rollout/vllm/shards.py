"""A model that is spread over several processes, a device each: vLLM's tensor parallelism, by its own executor.

The engine stays in the generator's process. Its workers hold the shards: of a layer that is split by its outputs the
rows of one process, of one that is split by its inputs the columns (Megatron-LM, Shoeybi et al. 2019, section 3). The
same goes for an adapter's B and A, of which the other one is whole in each process (S-LoRA, Sheng et al. 2023, section
6). If one worker ends, vLLM ends the others, and each call of the engine fails from then on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cluster.child import end_with_parent
from cluster.telemetry import peak_memory
from rollout.types import Held

SHARED_NAME = "VLLM_DIST_IDENT"  # in the environment of vLLM's workers on a CPU
THREADS, WARNINGS, TORCH_LOGS = "OMP_NUM_THREADS", "PYTHONWARNINGS", "TORCH_LOGS"
# The last is set by vLLM on a CPU (libgomp, tcmalloc): reward processes would inherit it from this process, tcmalloc's
# large reservations included.
FOR_WORKERS = (THREADS, WARNINGS, TORCH_LOGS, "LD_PRELOAD")
# Python's process that removes the shared memory of workers which were killed warns of each piece.
QUIET_TRACKER = "ignore::UserWarning:multiprocessing.resource_tracker"
QUIET_TORCH = "-torch._library.triton"  # a CPU has no Triton, which it warns of


def shard_arguments(shards: int, *, cuda: bool) -> dict[str, Any]:
    """Keywords of vllm.EngineArgs."""
    arguments: dict[str, Any] = {"tensor_parallel_size": shards, "distributed_executor_backend": "mp"}
    return arguments if cuda else arguments | {"worker_cls": "rollout.vllm.cpu_shard.CpuShard"}


@contextmanager
def workers_environment(shards: int) -> Iterator[None]:
    """Inside of it vLLM builds an engine, whose workers inherit this environment: each has its part of the compute
    threads of this process. What vLLM sets for them is undone."""
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
    """Once, after the engine is built: its workers end as soon as it does.

    They are killed with this process, even if they are stopped or hang: vLLM's own way is a thread in each that reads a
    pipe. And where the engine is closed they leave at once: they hold nothing but memory, and vLLM's clean-up of each
    takes seconds. Hence the names of all memory that they share go now, when all have it: it ends with them.
    """
    engine.collective_rpc(_settle_end, args=(os.getpid(),))
    executor = engine.model_executor
    for queue in (executor.rpc_broadcast_mq, *executor.response_mqs):
        _forget_name(queue)


def lost_shard(engine: Any, shards: int) -> str:
    """What an engine died of, if it was the end of one of its processes; else nothing."""
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
    """A [rank, in] and B [out, rank] of an adapted layer, put together from all shards. Each worker has to call this,
    in the same order.

    a, b: what this worker holds.
    """
    if layer.tp_size == 1:
        return a, b
    from vllm.distributed import tensor_model_parallel_all_gather as gather
    from vllm.lora.layers import ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA

    if isinstance(layer, RowParallelLinearWithLoRA):
        return gather(a.contiguous(), 1), b
    if not isinstance(layer, ColumnParallelLinearWithLoRA):  # whole in each worker
        return a, b
    sizes: Any = layer.base_layer.output_partition_sizes  # several where layers are fused
    fused_by_checkpoint = len(layer.lora_b_stacked) == 1
    parts = torch.split(b, sizes) if fused_by_checkpoint else (b,)
    return a, torch.cat([gather(rows.contiguous(), 0) for rows in parts])


def agreed(found: list[Held]) -> Held:
    """What all workers say; where they differ in what each has whole, a digest that is nobody's."""
    first, *others = found
    apart = {name for held in others for name in first.tensors if held.tensors.get(name) != first.tensors[name]}
    extra = {name for held in others for name in held.tensors.keys() - first.tensors.keys()}
    return Held(first.tensors | dict.fromkeys(apart | extra, "differs between shards"), first.unread)
