"""Loads policies into a running LLMEngine, and puts the engine to sleep and wakes it again.

Only the engine's own thread (rollout.vllm.engine) calls these functions, between two steps.
"""

from __future__ import annotations

from typing import Any

from rollout.engine import EngineSettings, NoAdapter
from rollout.types import EngineError, Held, Weights, WeightsInFile
from rollout.vllm.convert import AdapterWindow, Resident, lora_request
from rollout.vllm.read_back import held_by, unplaced
from rollout.weights import WeightsFile, WeightsReader, unpack

# Sleep, for a generator and a learner that take turns on one card: vLLM's sleep level 1.
#
# The code relies on this (read in vLLM 0.32, cumem.py and gpu_worker.py; run on an H200): weights and LoRA slots come
# from one memory pool, which level 1 copies to pinned host memory and unmaps; the KV cache is unmapped and lost.
# wake_up() maps both at the same addresses and copies weights and slots back, so CUDA graphs stay valid. The CUDA
# context keeps its memory.


def sleep(engine: Any, window: AdapterWindow, adapters: bool) -> Held | None:
    """Frees the device memory. No request may be running, since vLLM would drop it without an answer.

    Returns the digests of the newest adapter in its slot, for `wake` to compare. None before the first policy, and for
    whole weights: they are gigabytes, and the next policy that is delivered is read back anyhow.
    """
    newest = window.newest
    held = held_by(engine, newest, adapters) if adapters and newest else None
    engine.sleep(level=1)
    return held


def wake(engine: Any, window: AdapterWindow, before: Held | None) -> None:
    """Takes the device memory again, empties the prefix cache, and loads the newest adapter again.

    before: what `sleep` returned. Raises RuntimeError, which ends the engine, if vLLM keeps prefix cache blocks whose
    content is gone, or if the tensors of the adapter differ from `before`.
    """
    engine.wake_up()
    if not engine.reset_prefix_cache():
        raise RuntimeError("wake: vLLM kept the prefix cache, whose content was lost in sleep")
    newest = window.newest
    if before is None or newest is None:
        return
    # Slots have come back wrong from a level-1 sleep (vllm issue 53888), so all adapters are removed.
    for resident in window.residents:
        engine.remove_lora(resident.lora_id)
        if resident is not newest:
            window.drop(resident)
    engine.add_lora(lora_request(newest))
    if held_by(engine, newest, adapters=True) != before:
        raise RuntimeError(f"wake: the tensors of adapter v{newest.version} are not those that went to sleep")


# Three ways to load a policy: as one more adapter, in place of the present adapter, or as whole weights.

_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


def load_adapter(engine: Any, window: AdapterWindow, staged: Resident) -> bool:
    """Makes the staged adapter the newest; False if the window is full and every adapter in it is in use.

    Raises EngineError (see AdapterWindow.check), also if vLLM refuses the adapter or does not keep it.
    """
    window.check(staged)
    if not _make_room(engine, window):
        return False
    _put(engine, staged, in_place=False)
    window.add(staged)
    return True


def replace_adapter(engine: Any, window: AdapterWindow, staged: Resident) -> None:
    """Puts the staged adapter in the place of the present one; running requests go on under the new one.

    The KV cache of running requests is kept (PipelineRL, Piché et al. 2025), so nothing is computed twice. Each
    recorded logprob is that of the distribution which was sampled; given the same tokens, the new policy alone would
    have a slightly different one.

    Raises EngineError as load_adapter does; then the present adapter stays in force.
    """
    window.check(staged)
    _put(engine, staged, in_place=True)
    window.replace(staged)


def _put(engine: Any, staged: Resident, *, in_place: bool) -> None:
    if lost := unplaced(engine, staged):
        raise EngineError(
            f"adapter v{staged.version}: vLLM has no place for {len(lost)} of its tensors, first {lost[0]}, which it "
            "would leave out silently; leave their layers out of the adapter, or push merged weights"
        )
    try:
        engine.add_lora(lora_request(staged, load_inplace=in_place))
    except ValueError as error:
        raise EngineError(f"vLLM refused adapter v{staged.version}: {error}") from error
    if staged.lora_id not in engine.list_loras():
        raise EngineError(f"vLLM took adapter v{staged.version} but does not list it; restart the worker")


def _make_room(engine: Any, window: AdapterWindow) -> bool:
    """Drops the oldest unused version if the window is full; False if there is none. vLLM's own LRU might drop a
    version that is in use."""
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
    """Replaces the model's weights that the staged ones name; the other weights stay.

    source: the safetensors bytes for an engine in this process; for one with several shards, where each process finds
    them.

    Running requests go on under the new weights as replace_adapter says. The prefix cache holds keys and values of the
    old weights, and only requests that began under the old version find them, since the version is part of each
    prompt's cache salt (EngineSteps).

    Raises EngineError if the version or the names are wrong. Any other error leaves a model of mixed versions, so it is
    raised as a RuntimeError, which ends the engine.
    """
    window.check(staged)
    if staged.keys:  # there are none in Weights.unchanged
        load = _replace_from if isinstance(source, WeightsInFile) else _replace
        try:
            engine.collective_rpc(load, args=(source, staged.keys))
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"weights v{staged.version} were loaded in part: {cause}") from error
    window.replace(staged)


def _replace_from(worker: Any, place: WeightsInFile, names: frozenset[str]) -> None:
    """Runs in each worker of an engine with several shards, which loads its part. The weights are mapped, since vLLM
    would send each worker a pickled copy."""
    reader: WeightsReader = vars(worker).setdefault("gleaner_reader", WeightsReader())
    with reader.payload(place) as payload:
        _replace(worker, payload, names)


def _replace(worker: Any, payload: bytes | memoryview, names: frozenset[str]) -> None:
    """Runs in vLLM's worker: loads the weights, and renews the repacked copy of the output embedding on a CPU."""
    worker.reload_weights(weights_iterator=unpack(payload), is_checkpoint_format=True)
    model = worker.model_runner.get_model()
    head: Any = getattr(model, "lm_head", None)
    if not hasattr(head, "cpu_linear") or not any(name.endswith(_EMBEDDINGS) for name in names):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    # vLLM on a CPU computes with a repacked copy of the output embedding. A reload does not renew the copy of an output
    # embedding that is tied to the input embedding: vLLM would go on with the old copy, and only log that.
    if model.config.tie_word_embeddings:
        head.weight = model.model.embed_tokens.weight
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


class Policies:
    """The policies of one engine: loads them, reads the newest back, and knows whether the engine sleeps.

    window: the policy versions that the engine holds.
    """

    def __init__(self, engine: Any, settings: EngineSettings, window: AdapterWindow) -> None:
        self._engine, self._settings, self._window = engine, settings, window
        self._asleep = False
        self._slept: Held | None = None  # digests of the newest adapter when the engine went to sleep
        self._copies = WeightsFile(places=1)  # for weights that came through Ray's object store, to be read by shards

    def newest(self) -> Resident:
        """The policy for new requests. Raises NoAdapter before the first policy, EngineError while asleep."""
        self._require_awake()
        newest = self._window.newest
        if newest is None:
            raise NoAdapter("no adapter is loaded; await load_adapter first")
        return newest

    def held(self) -> Held:
        """The newest policy, read back from the tensors in use. Raises as `newest`."""
        return held_by(self._engine, self.newest(), adapters=self._settings.max_lora_rank > 0)

    def load(self, staged: Resident, weights: Weights | None, *, running: bool) -> bool:
        """Makes a staged policy the newest; False if it must wait for requests that are running.

        weights: None for an adapter, which lies in its folder. Loading the newest policy again changes nothing.
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
        """Where the engine's processes find the weights."""
        if self._settings.shards == 1:  # the engine is in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0)
            return weights.payload
        return weights.place or self._copies.copy(weights)

    def close(self) -> None:
        """Frees the memory of copied weights, after the engine has ended."""
        self._copies.close()

    def sleep(self, running: int) -> None:
        """See Engine.sleep. running: how many requests are running."""
        if self._asleep:
            return
        if not self._settings.sleeps:
            raise EngineError("sleep: the engine must be started with sleeps=True, got False; set it in EngineSettings")
        if running:
            raise EngineError(f"sleep: nothing may be running, got {running} calls; await them first")
        self._slept = sleep(self._engine, self._window, adapters=self._settings.max_lora_rank > 0)
        self._asleep = True

    def wake(self) -> None:
        """See Engine.wake."""
        if self._asleep:
            wake(self._engine, self._window, self._slept)
        self._asleep = False

    def _require_awake(self) -> None:
        if self._asleep:
            raise EngineError("the engine is asleep and holds no model on its device; await wake() first")
