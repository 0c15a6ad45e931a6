"""vLLM's sleep level 1, for two roles that take turns on one card. Only the engine's own thread calls these.

What is relied on (read in vLLM 0.32, cumem.py and gpu_worker.py; run on an H200): weights and LoRA slots come from
one memory pool, which level 1 copies to pinned host memory and unmaps; the KV cache is unmapped and forgotten.
wake_up() maps both at the same addresses and copies the first back, so CUDA graphs stay valid. The CUDA context stays.
"""

from __future__ import annotations

from typing import Any

from rollout.types import Held
from rollout.vllm.adapter_cache import AdapterWindow
from rollout.vllm.convert import lora_request
from rollout.vllm.read_back import held_by


def sleep(engine: Any, window: AdapterWindow, adapters: bool) -> Held | None:
    """Frees the device memory; nothing may be running, since vLLM would drop it without an answer.

    Returns the newest adapter as it lay in its slot, for wake; None for whole weights (gigabytes, and the next policy
    that is delivered is read back anyhow) or before the first policy.
    """
    newest = window.newest
    held = held_by(engine, newest, adapters) if adapters and newest else None
    engine.sleep(level=1)
    return held


def wake(engine: Any, window: AdapterWindow, before: Held | None) -> None:
    """Device memory back, an empty prefix cache, and the newest adapter loaded again (before: what sleep returned).

    Raises RuntimeError, which ends the engine, if vLLM keeps the blocks of a cache whose content is gone, or if the
    adapter is not what it was.
    """
    engine.wake_up()
    if not engine.reset_prefix_cache():
        raise RuntimeError("wake: vLLM kept the prefix cache, whose content was lost in sleep")
    newest = window.newest
    if before is None or newest is None:
        return
    # Slots that came back wrong from a level-1 sleep are on record (vllm issue 53888), hence none is trusted.
    for resident in window.residents:
        engine.remove_lora(resident.lora_id)
        if resident is not newest:
            window.drop(resident)
    engine.add_lora(lora_request(newest))
    if held_by(engine, newest, adapters=True) != before:
        raise RuntimeError(f"wake: the tensors of adapter v{newest.version} are not those that went to sleep")
