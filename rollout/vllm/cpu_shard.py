"""vLLM's worker of one shard on a CPU. In a process that vLLM starts, so what gleaner changes is changed here again."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from rollout.vllm.cpu import prepare_cpu_process


class CpuShard(CPUWorker):
    """As vLLM's, with what rollout.vllm.cpu changes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        prepare_cpu_process()
        super().__init__(*args, **kwargs)
