"""vLLM's worker of one shard on a CPU. In a process that vLLM starts, so what gleaner changes is changed here again."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from rollout.vllm.cpu_lora import install_fast_cpu_lora, serve_experts
from rollout.vllm.cpu_norm import install_cpu_norm


class CpuShard(CPUWorker):
    """As vLLM's, with the LoRA, the experts and the norm of rollout.vllm.cpu_lora and cpu_norm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        install_fast_cpu_lora()
        serve_experts()
        install_cpu_norm()
        super().__init__(*args, **kwargs)
