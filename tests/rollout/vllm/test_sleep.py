"""Sleep and wake of the real engine, on a CPU: all but the device memory, since vLLM's CPU worker ignores the call."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from examples.random_model import make_tiny_model
from rollout.engine import EngineAsleep, EngineDied
from rollout.types import EngineError, Sampling
from tests.rollout.engine_case import PROMPT, EngineCase, run, settings


def test_an_engine_that_cannot_sleep_says_so_at_start() -> None:
    from rollout.vllm.arguments import engine_arguments

    sleeper = settings(Path("m"), sleeps=True)
    with pytest.raises(ValueError, match="sleeps: vLLM sleeps on CUDA only"):
        engine_arguments(sleeper, cuda=False)
    assert engine_arguments(sleeper, cuda=True)["enable_sleep_mode"]
    assert "enable_sleep_mode" not in engine_arguments(settings(Path("m")), cuda=True)


def test_asleep_it_refuses_and_awake_it_is_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = EngineCase(make_tiny_model(tmp_path, family="Llama"))
    engine, thread = case.engine, case.engine._thread
    sampling = Sampling(n=2, max_tokens=8, seed=3)
    with pytest.raises(EngineError, match="started with sleeps=True"):
        run(engine.sleep())
    policies = thread._turns._policies
    monkeypatch.setattr(policies, "_settings", dataclasses.replace(policies._settings, sleeps=True))

    async def story() -> None:
        for _ in range(2):
            await engine.load_adapter(case.next_adapter())
        call = asyncio.create_task(engine.generate(PROMPT, Sampling(n=16, max_tokens=400, seed=0)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="nothing may be running, got 1"):
            await engine.sleep()
        await call
        before = await engine.generate(PROMPT, sampling)
        for _ in range(2):
            await engine.sleep()
        late = case.next_adapter()
        for refused in (engine.generate(PROMPT, sampling), engine.probe(PROMPT), engine.load_adapter(late)):
            with pytest.raises(EngineAsleep, match="await wake"):
                await refused
        for _ in range(2):
            await engine.wake()
        newest = thread.window.newest
        assert newest is not None
        assert thread._turns.engine.list_loras() == {newest.lora_id}
        assert [resident.version for resident in thread.window.residents] == [1]
        after = await engine.generate(PROMPT, sampling)
        assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(after, before, strict=True))
        for completion in after:
            case.check(completion, PROMPT, 1)
        await engine.load_adapter(late)
        await engine.sleep()
        # Layers that take nothing: the newest is loaded into another slot than it had, which holds an older one.
        (worker,) = thread._turns.engine.collective_rpc(lambda worker: worker)
        for layer in worker.model_runner.lora_manager._adapter_manager.modules.values():
            layer.set_lora = layer.reset_lora = lambda *_, **__: None
        with pytest.raises(EngineDied, match="wake: the tensors of adapter v2 are not those that went to sleep"):
            await engine.wake()

    try:
        run(story())
    finally:
        run(engine.close())
