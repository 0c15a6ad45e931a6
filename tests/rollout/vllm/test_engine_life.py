"""The life of a VllmEngine: its adapter window, what it refuses, cancellation, death and close."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.random_model import VOCAB_SIZE, make_adapter
from rollout.engine import AdapterRefused, EngineClosed, EngineDied, EngineEnvError
from rollout.types import Adapter, AdapterCorrupt, Completion, EngineError, Sampling
from rollout.vllm.engine import VllmEngine
from tests.rollout.engine_case import PROMPT, EngineCase, run, settings


def versions(case: EngineCase) -> list[int]:
    return [resident.version for resident in case.engine._thread.window.residents]


def test_the_window_drops_the_oldest_unused_version(case: EngineCase) -> None:
    async def fill() -> None:
        adapters = [case.next_adapter() for _ in range(4)]
        used = adapters[0].version
        await case.engine.load_adapter(adapters[0])
        oldest = asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=16, max_tokens=400, seed=0)))
        await asyncio.sleep(0.02)
        for adapter in adapters[1:]:  # a window of 3: the version in use stays, the one after it goes
            await case.engine.load_adapter(adapter)
        assert not oldest.done()
        assert versions(case) == [used, used + 2, used + 3]
        case.check((await oldest)[0], PROMPT, used)
        await case.engine.load_adapter(case.next_adapter())

    run(fill())
    kept = [case.newest - 2, case.newest - 1, case.newest]
    assert versions(case) == kept
    assert case.engine._thread._turns.engine.list_loras() == {version + 1 for version in kept}
    folders = Path(case.engine._thread.window._root.name).iterdir()
    assert sorted(folder.name.split("-")[0] for folder in folders) == sorted(f"v{version}" for version in kept)


def test_loading_waits_while_every_version_is_in_use(case: EngineCase) -> None:
    async def overfill() -> None:
        adapters = [case.next_adapter() for _ in range(4)]
        calls = []
        for adapter in adapters[:3]:
            await case.engine.load_adapter(adapter)
            calls.append(asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=8, max_tokens=200, seed=0))))
            await asyncio.sleep(0.02)
        assert not any(call.done() for call in calls)
        await case.engine.load_adapter(adapters[3])
        assert any(call.done() for call in calls[:2]), "only a version that nobody uses may make room"
        for adapter, call in zip(adapters, calls, strict=False):
            case.check((await call)[0], PROMPT, adapter.version)

    run(overfill())


def test_bad_adapters_are_refused_and_change_nothing(case: EngineCase) -> None:
    version = case.newest + 1
    payload, config = make_adapter(case.model, seed=99)
    before = run(case.engine.probe(PROMPT))

    torn = dataclasses.replace(Adapter.build(version, payload, config), payload=payload[:-1] + b"?")
    with pytest.raises(AdapterCorrupt, match=f"v{version}"):
        run(case.engine.load_adapter(torn))
    with pytest.raises(AdapterRefused, match="must be safetensors"):
        run(case.engine.load_adapter(Adapter.build(version, b"rubbish", config)))
    with pytest.raises(AdapterRefused, match="missing"):
        run(case.engine.load_adapter(Adapter.build(version, _without_gate(payload), config)))
    with pytest.raises(AdapterRefused, match="rank 16"):
        run(case.engine.load_adapter(Adapter.build(version, *make_adapter(case.model, seed=1, rank=16))))
    with pytest.raises(AdapterRefused, match="must be above"):
        run(case.engine.load_adapter(Adapter.build(case.newest, payload, config)))

    assert np.array_equal(run(case.engine.probe(PROMPT)), before)
    again = case.adapters[-1]
    assert run(case.engine.load_adapter(again)) == again.digest, "sending the newest once more is harmless"


def _without_gate(payload: bytes) -> bytes:
    from safetensors.torch import load, save

    return save({name: weight for name, weight in load(payload).items() if "gate_proj" not in name})


def test_only_an_engine_that_was_started_for_it_shares_its_base(case: EngineCase) -> None:
    with pytest.raises(EngineError, match="share_base: the engine must be started with shares_base=True"):
        run(case.engine.share_base())


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [([], 4, "at least 1 token"), (PROMPT, 448, "max_model_len=448"), ([VOCAB_SIZE], 4, "token ids must be in")],
)
def test_bad_prompts_fail_their_own_call_only(
    case: EngineCase, prompt: list[int], max_tokens: int, message: str
) -> None:
    async def ask() -> list[Completion]:
        good = asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=2, max_tokens=16)))
        with pytest.raises(ValueError, match=message):
            await case.engine.generate(prompt, Sampling(n=1, max_tokens=max_tokens))
        return await good

    assert len(run(ask())) == 2


def test_a_cancelled_call_leaves_the_engine(case: EngineCase) -> None:
    async def cancel() -> None:
        call = asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=16, max_tokens=400)))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await case.engine.probe(PROMPT)
        assert not case.engine._thread._turns.running
        assert not case.engine._thread._turns.engine.has_unfinished_requests()
        assert not case.engine._thread._turns.engine.output_processor.parent_requests

    run(cancel())


def test_an_error_in_the_engine_thread_reaches_every_caller(
    case: EngineCase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = VllmEngine(settings(case.model))
    folder = Path(engine._thread.window._root.name)
    vllm, steps = engine._thread._turns.engine, iter(range(1000))
    step = vllm.step

    def failing_step() -> Any:
        if next(steps) >= 5:
            raise RuntimeError("the card fell off the bus")
        return step()

    monkeypatch.setattr(vllm, "step", failing_step)

    async def ask() -> None:
        await engine.load_adapter(case.adapters[0])
        calls = [engine.generate(PROMPT, Sampling(n=2, max_tokens=50)) for _ in range(3)]
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(answer, EngineDied)
            assert "fell off the bus" in str(answer)
        with pytest.raises(EngineDied, match="restart its worker"):
            await engine.probe(PROMPT)
        await engine.close()

    run(ask())
    assert not folder.exists()


def test_close_fails_what_is_running_and_deletes_the_files(case: EngineCase) -> None:
    engine = VllmEngine(settings(case.model))
    folder = Path(engine._thread.window._root.name)

    async def ask() -> None:
        await engine.load_adapter(case.adapters[0])
        call = asyncio.create_task(engine.generate(PROMPT, Sampling(n=4, max_tokens=400)))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineClosed):
            await call
        with pytest.raises(EngineClosed):
            await engine.generate(PROMPT, Sampling(n=1, max_tokens=4))
        await engine.close()

    run(ask())
    assert not folder.exists()


def test_the_environment_is_checked_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    with pytest.raises(EngineEnvError, match="VLLM_ENABLE_V1_MULTIPROCESSING must be '0'"):
        VllmEngine(settings(Path("/nowhere")))
