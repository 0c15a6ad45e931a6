"""vLLM's worker of one shard on a CPU. In a process that vLLM starts, so what gleaner changes is changed here again."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from rollout.vllm.cpu_lora import install_fast_cpu_lora, serve_experts


class CpuShard(CPUWorker):
    """As vLLM's, with the LoRA and the experts of rollout.vllm.cpu_lora."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        install_fast_cpu_lora()
        serve_experts()
        super().__init__(*args, **kwargs)
