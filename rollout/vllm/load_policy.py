"""Loads a new policy into a running LLMEngine: as one more adapter, in place of the adapter there, or as whole weights.

Only the engine's own thread calls these, between two steps.
"""

from __future__ import annotations

from typing import Any

from rollout.engine import AdapterRefused
from rollout.safetensors_stream import unpack
from rollout.types import EngineError, WeightsInFile
from rollout.vllm.adapter_cache import AdapterWindow, Resident
from rollout.vllm.convert import lora_request
from rollout.weights_file import WeightsReader

_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


def load_adapter(engine: Any, window: AdapterWindow, staged: Resident) -> bool:
    """Makes the staged adapter the newest; False if every resident one is in use.

    Raises AdapterRefused, or EngineError if vLLM did not keep it.
    """
    window.check(staged)
    if not _make_room(engine, window):
        return False
    _put(engine, staged, in_place=False)
    window.add(staged)
    return True


def replace_adapter(engine: Any, window: AdapterWindow, staged: Resident) -> None:
    """Puts the staged adapter in the place of the one there is; running requests go on under it.

    Their keys and values stay (PipelineRL, Piché et al. 2025): nothing is computed twice, and each recorded logprob is
    that of the distribution really sampled, which is not quite the new policy's own given the same tokens.

    Raises as load_adapter; the adapter there is then stays in force.
    """
    window.check(staged)
    _put(engine, staged, in_place=True)
    window.replace(staged)


def _put(engine: Any, staged: Resident, *, in_place: bool) -> None:
    try:
        engine.add_lora(lora_request(staged, load_inplace=in_place))
    except ValueError as error:
        raise AdapterRefused(f"vLLM refused adapter v{staged.version}: {error}") from error
    if staged.lora_id not in engine.list_loras():
        raise EngineError(f"vLLM took adapter v{staged.version} but does not list it; restart the worker")


def _make_room(engine: Any, window: AdapterWindow) -> bool:
    """Drops the oldest unused version if the window is full. vLLM's own LRU could drop one that is in use."""
    if not window.is_full():
        return True
    evictable = window.evictable()
    if evictable is None:
        return False
    engine.remove_lora(evictable.lora_id)
    window.drop(evictable)
    return True


def load_weights(
    engine: Any, window: AdapterWindow, staged: Resident, source: bytes | memoryview | WeightsInFile
) -> None:
    """Puts the staged weights (safetensors) in the place of those of the same names; the others stay.

    source: for an engine in this process they are in its memory; for one of several processes, where each finds them.

    Requests that run go on under them as replace_adapter says. Cached keys and values are the old weights', and only
    requests that began under those find them: each prompt carries its version (EngineThread).

    Raises AdapterRefused if their version or names are wrong. Anything else that goes wrong leaves a model of two
    versions, hence is a RuntimeError that ends the engine.
    """
    window.check(staged)
    if staged.keys:  # else Weights.unchanged
        load = _replace_from if isinstance(source, WeightsInFile) else _replace
        try:
            engine.collective_rpc(load, args=(source, staged.keys))
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"weights v{staged.version} were loaded in part: {cause}") from error
    window.replace(staged)


def _replace_from(worker: Any, place: WeightsInFile, names: frozenset[str]) -> None:
    """Runs in each of several workers, which loads its part. vLLM's own way to them would send each a pickled copy."""
    reader: WeightsReader = vars(worker).setdefault("gleaner_reader", WeightsReader())
    with reader.payload(place) as payload:
        _replace(worker, payload, names)


def _replace(worker: Any, payload: bytes | memoryview, names: frozenset[str]) -> None:
    """Runs in vLLM's worker."""
    worker.reload_weights(weights_iterator=unpack(payload), is_checkpoint_format=True)
    model = worker.model_runner.get_model()
    head: Any = getattr(model, "lm_head", None)
    if not hasattr(head, "cpu_linear") or not any(name.endswith(_EMBEDDINGS) for name in names):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    # vLLM on a CPU computes with a repacked copy of the output embedding, which a reload does not renew where it is
    # tied to the input embedding: it would go on with the old one, with no more than a line in the log.
    if model.config.tie_word_embeddings:
        head.weight = model.model.embed_tokens.weight
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)
