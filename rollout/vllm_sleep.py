"""vLLM's sleep level 1, for two roles that take turns on one card. Only the engine's own thread calls these.

What is relied on (read in vLLM 0.32, cumem.py and gpu_worker.py; run on no card yet): weights and LoRA slots come from
one memory pool, which level 1 copies to pinned host memory and unmaps; the KV cache is unmapped and forgotten.
wake_up() maps both at the same addresses and copies the first back, so CUDA graphs stay valid. The CUDA context stays.
"""

from __future__ import annotations

from typing import Any

from rollout.adapter_window import AdapterWindow
from rollout.vllm_calls import lora_request


def sleep(engine: Any) -> None:
    """Frees the device memory; nothing may be running, since vLLM would drop it without an answer."""
    engine.sleep(level=1)


def wake(engine: Any, window: AdapterWindow, adapters: bool) -> None:
    """Device memory back, an empty prefix cache, and the newest adapter loaded again (adapters: there are some).

    Raises RuntimeError, which ends the engine, if vLLM keeps the blocks of a cache whose content is gone.
    """
    engine.wake_up()
    if not engine.reset_prefix_cache():
        raise RuntimeError("wake: vLLM kept the prefix cache, whose content was lost in sleep")
    newest = window.newest
    if not adapters or newest is None:
        return
    # Slots that came back wrong from a level-1 sleep are on record (vllm issue 53888), hence none is trusted.
    for resident in window.residents:
        engine.remove_lora(resident.lora_id)
        if resident is not newest:
            window.drop(resident)
    engine.add_lora(lora_request(newest))
