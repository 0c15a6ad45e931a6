"""vLLM's worker of one shard. vLLM starts its process, so what gleaner changes of vLLM is changed there again."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from rollout.vllm.text_view import register_in_worker

worker: Any
if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as worker
else:
    from vllm.v1.worker.gpu_worker import Worker as worker


class Shard(worker):  # type: ignore[misc]
    """vLLM's worker for this device, in a process that knows the text part of the model, and on a CPU has the changes
    of rollout.vllm.cpu."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if current_platform.is_cpu():
            from rollout.vllm.cpu import prepare_cpu_process  # imported here: it is for vLLM's CPU build alone

            prepare_cpu_process()
        register_in_worker(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
