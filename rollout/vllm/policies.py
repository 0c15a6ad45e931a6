"""The policies of a running LLMEngine, and its sleep, in which it has none. For the engine's own thread only."""

from __future__ import annotations

from typing import Any

from rollout.engine import AdapterRefused, EngineAsleep, EngineSettings, NoAdapter
from rollout.types import EngineError, Held, Weights, WeightsInFile
from rollout.vllm.adapter_cache import AdapterWindow, Resident
from rollout.vllm.load_policy import load_adapter, load_weights, replace_adapter
from rollout.vllm.read_back import held_by
from rollout.vllm.sleep import sleep, wake
from rollout.weights_file import WeightsFile


class Policies:
    """window: the versions that the engine holds."""

    def __init__(self, engine: Any, settings: EngineSettings, window: AdapterWindow) -> None:
        self._engine, self._settings, self._window = engine, settings, window
        self._asleep = False
        self._slept: Held | None = None  # the newest adapter, when it went to sleep
        self._copies = WeightsFile(places=1)  # of weights that came through Ray's object store

    def newest(self) -> Resident:
        """What requests are to be answered with. Raises EngineAsleep, or NoAdapter before the first."""
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
            raise AdapterRefused(
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
            raise EngineAsleep("the engine is asleep and holds no model on its device; await wake() first")
