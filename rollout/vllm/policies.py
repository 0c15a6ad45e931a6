"""The policies of a running LLMEngine, and its sleep, in which it has none. For the engine's own thread only."""

from __future__ import annotations

from typing import Any

from rollout.engine import EngineSettings, NoAdapter
from rollout.types import EngineError, Held, Weights, WeightsInFile
from rollout.vllm.convert import AdapterWindow, Resident, lora_request
from rollout.vllm.read_back import held_by
from rollout.weights import WeightsFile, WeightsReader, unpack

# vLLM's sleep level 1, for two roles that take turns on one card. Only the engine's own thread calls these.
#
# What is relied on (read in vLLM 0.32, cumem.py and gpu_worker.py; run on an H200): weights and LoRA slots come from
# one memory pool, which level 1 copies to pinned host memory and unmaps; the KV cache is unmapped and forgotten.
# wake_up() maps both at the same addresses and copies the first back, so CUDA graphs stay valid. The CUDA context
# stays.


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


# Loads a new policy into a running LLMEngine: as one more adapter, in place of the adapter there, or as whole weights.
#
# Only the engine's own thread calls these, between two steps.

_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


def load_adapter(engine: Any, window: AdapterWindow, staged: Resident) -> bool:
    """Makes the staged adapter the newest; False if every resident one is in use.

    Raises EngineError, or EngineError if vLLM did not keep it.
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
        raise EngineError(f"vLLM refused adapter v{staged.version}: {error}") from error
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

    Raises EngineError if their version or names are wrong. Anything else that goes wrong leaves a model of two
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


class Policies:
    """window: the versions that the engine holds."""

    def __init__(self, engine: Any, settings: EngineSettings, window: AdapterWindow) -> None:
        self._engine, self._settings, self._window = engine, settings, window
        self._asleep = False
        self._slept: Held | None = None  # the newest adapter, when it went to sleep
        self._copies = WeightsFile(places=1)  # of weights that came through Ray's object store

    def newest(self) -> Resident:
        """What requests are to be answered with. Raises EngineError, or NoAdapter before the first."""
        self._require_awake()
        newest = self._window.newest
        if newest is None:
            raise NoAdapter("no adapter is loaded; await load_adapter first")
        return newest

    def held(self) -> Held:
        """The tensors in use, of the newest."""
        return held_by(self._engine, self.newest(), adapters=self._settings.max_lora_rank > 0)

    def load(self, staged: Resident, weights: Weights | None, *, running: bool) -> bool:
        """Makes a staged policy the newest; False if it must wait for requests that are running.

        weights: None for an adapter, which lies in its folder. The newest once more changes nothing.
        """
        newest = self._window.newest
        try:
            self._require_awake()
            if newest is not None and (staged.version, staged.digest) == (newest.version, newest.digest):
                self._window.discard(staged)
                return True
            return self._load_new(staged, weights, running)
        except EngineError:
            self._window.discard(staged)
            raise

    def _load_new(self, staged: Resident, weights: Weights | None, running: bool) -> bool:
        if (weights is None) == (self._settings.max_lora_rank == 0):
            raise EngineError(
                f"policy v{staged.version}: an engine started with max_lora_rank={self._settings.max_lora_rank} "
                f"takes {'whole weights' if weights is None else 'adapters'} only; start it for the other kind"
            )
        continues = self._settings.in_flight == "continue"
        if weights is None and not continues:
            return load_adapter(self._engine, self._window, staged)
        if weights is None:
            replace_adapter(self._engine, self._window, staged)
        elif running and not continues:
            return False
        else:
            load_weights(self._engine, self._window, staged, self._source(weights))
        if continues:
            self._engine.set_weight_version(str(staged.version))  # labels every token from the next step on
        return True

    def _source(self, weights: Weights) -> bytes | memoryview | WeightsInFile:
        """Where the engine's processes find them."""
        if self._settings.shards == 1:  # in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)
            return weights.payload
        return weights.place or self._copies.copy(weights)

    def close(self) -> None:
        """Lets go of memory, when the engine has ended."""
        self._copies.close()

    def sleep(self, running: int) -> None:
        """Frees the device memory; nothing happens if it is free already. running: requests."""
        if self._asleep:
            return
        if not self._settings.sleeps:
            raise EngineError("sleep: the engine must be started with sleeps=True, got False; set it in EngineSettings")
        if running:
            raise EngineError(f"sleep: nothing may be running, got {running} calls; await them first")
        self._slept = sleep(self._engine, self._window, adapters=self._settings.max_lora_rank > 0)
        self._asleep = True

    def wake(self) -> None:
        """Ends sleep()."""
        if self._asleep:
            wake(self._engine, self._window, self._slept)
        self._asleep = False

    def _require_awake(self) -> None:
        if self._asleep:
            raise EngineError("the engine is asleep and holds no model on its device; await wake() first")
