"""vLLM's worker of one shard on a card, for checkpoints with towers, whose text part each process has to know."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from rollout.vllm.text_view import know_as_parent


class CardShard(Worker):
    """vLLM's Worker in a process that knows the text part of the model."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        know_as_parent(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
