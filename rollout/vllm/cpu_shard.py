"""vLLM's worker of one shard on a CPU. vLLM starts its process, so gleaner's changes of vLLM are made there again."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from rollout.vllm.cpu import prepare_cpu_process
from rollout.vllm.text_view import know_as_parent


class CpuShard(CPUWorker):
    """vLLM's CPUWorker in a process with the changes of rollout.vllm.cpu."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        prepare_cpu_process()
        know_as_parent(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
