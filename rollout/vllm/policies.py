"""The policies of a running LLMEngine, and its sleep, in which it has none. For the engine's own thread only."""

from __future__ import annotations

from typing import Any

from rollout.engine import AdapterRefused, EngineAsleep, EngineSettings, NoAdapter
from rollout.types import EngineError, Held
from rollout.vllm.adapter_cache import AdapterWindow, Resident
from rollout.vllm.load_policy import load_adapter, load_weights, replace_adapter
from rollout.vllm.read_back import held_by
from rollout.vllm.sleep import sleep, wake


class Policies:
    """window: the versions that the engine holds."""

    def __init__(self, engine: Any, settings: EngineSettings, window: AdapterWindow) -> None:
        self._engine, self._settings, self._window = engine, settings, window
        self._asleep = False
        self._slept: Held | None = None  # the newest adapter, when it went to sleep

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

    def load(self, staged: Resident, payload: bytes | memoryview | None, *, running: bool) -> bool:
        """Makes a staged policy the newest; False if it must wait for requests that are running.

        payload: of whole weights; an adapter lies in its folder. The newest once more changes nothing.
        """
        newest = self._window.newest
        try:
            self._require_awake()
            if newest is not None and (staged.version, staged.digest) == (newest.version, newest.digest):
                self._window.discard(staged)
                return True
            return self._load_new(staged, payload, running)
        except EngineError:
            self._window.discard(staged)
            raise

    def _load_new(self, staged: Resident, payload: bytes | memoryview | None, running: bool) -> bool:
        if (payload is None) == (self._settings.max_lora_rank == 0):
            raise AdapterRefused(
                f"policy v{staged.version}: an engine started with max_lora_rank={self._settings.max_lora_rank} "
                f"takes {'whole weights' if payload is None else 'adapters'} only; start it for the other kind"
            )
        continues = self._settings.in_flight == "continue"
        if payload is None and not continues:
            return load_adapter(self._engine, self._window, staged)
        if payload is None:
            replace_adapter(self._engine, self._window, staged)
        elif running and not continues:
            return False
        else:
            load_weights(self._engine, self._window, staged, payload, self._settings.shards)
        if continues:
            self._engine.set_weight_version(str(staged.version))  # labels every token from the next step on
        return True

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
