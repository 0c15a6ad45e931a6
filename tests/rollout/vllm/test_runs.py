"""One engine of several runs: each run's completions are of its own policies, whatever the others' do."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from rollout.engine import NoAdapter
from rollout.types import Adapter, Completion, EngineError, Sampling
from rollout.vllm.arguments import common
from rollout.vllm.engine import VllmEngine
from rollout.weights import unpack
from tests.rollout.engine_case import PROMPT, EngineCase, run, settings


def at_scale(adapter: Adapter, scale: float) -> Adapter:
    """The adapter with B multiplied."""
    tensors = {name: value * (scale if "lora_B" in name else 1) for name, value in unpack(adapter.payload)}
    from safetensors.torch import save

    return Adapter.build(adapter.version, save(tensors), adapter.config)


def test_runs_share_an_engine_and_nothing_else(case: EngineCase) -> None:
    """Their prompts are equal and their versions too: what keeps them apart is the run alone."""
    own = settings(case.model, kv_cache_bytes=8 << 20)
    engine = VllmEngine(own, dataclasses.replace(own, max_lora_rank=4, adapter_window=2, seed=2))
    first, second = engine, engine.of_run(1)
    adapters = [dataclasses.replace(case.adapters[0], version=0)]
    long = [i % 250 for i in range(300)]  # several full blocks, which the prefix cache would share

    async def ask() -> None:
        with pytest.raises(NoAdapter):
            await second.generate(PROMPT, Sampling(n=1, max_tokens=4))
        other = Adapter.build(0, *_rank_4(case.model))
        assert await first.load_adapter(adapters[0]) == adapters[0].digest
        assert await second.load_adapter(other) == other.digest
        groups = await asyncio.gather(
            *(each.generate(long, Sampling(n=4, max_tokens=24, seed=7)) for each in (first, second, first, second))
        )
        assert [c.token_ids.tolist() for c in groups[0]] != [c.token_ids.tolist() for c in groups[1]]
        reference = EngineReference(case, other)
        for group in (groups[0], groups[2]):
            for completion in group:
                case.check(completion, long, 0)
        for group in (groups[1], groups[3]):
            for completion in group:
                reference.check(completion, long)
        assert (await first.held()) != (await second.held())
        assert np.abs(await second.probe(long) - reference.logprobs(long)).max() < 1e-4
        # The window of one run does not make room at the cost of the other.
        for version in range(1, 5):
            await second.load_adapter(dataclasses.replace(other, version=version))
        (again,) = await first.generate(PROMPT, Sampling(n=1, max_tokens=8, seed=3))
        case.check(again, PROMPT, 0)
        # A policy of one run that waits for room holds up nothing of the other's.
        under_way = [asyncio.create_task(first.generate(PROMPT, Sampling(n=8, max_tokens=390, seed=1)))]
        for version in (1, 2):
            await asyncio.sleep(0.02)  # the request before is in the engine, so its version is in use
            await first.load_adapter(dataclasses.replace(adapters[0], version=version))
            under_way.append(asyncio.create_task(first.generate(PROMPT, Sampling(n=8, max_tokens=390, seed=1))))
        await asyncio.sleep(0.02)
        waits = asyncio.create_task(first.load_adapter(dataclasses.replace(adapters[0], version=3)))
        await asyncio.sleep(0)
        await second.load_adapter(dataclasses.replace(other, version=5))
        await second.probe(PROMPT)  # completions would wait for the first run's turn to end, as on every CPU
        assert not waits.done(), "all three versions of the window are in use"
        await asyncio.gather(waits, *under_way)
        await first.close()
        (still,) = await second.generate(PROMPT, Sampling(n=1, max_tokens=8, seed=3))
        assert still.versions.tolist() == [5] * len(still.token_ids)
        await second.close()
        with pytest.raises(EngineError, match="closed"):
            await second.generate(PROMPT, Sampling(n=1, max_tokens=4))

    run(ask())


def test_numbers_of_one_run_that_are_not_finite_stay_its_own(case: EngineCase) -> None:
    """Without zeroed_blocks most completions of the good run are nan after those of the bad one."""
    own = settings(case.model, kv_cache_bytes=2 << 20, max_num_seqs=16)
    engine = VllmEngine(own, own)
    good, bad = engine, engine.of_run(1)
    adapter = dataclasses.replace(case.adapters[0], version=0)

    async def finite(of: VllmEngine, seed: int) -> int:
        completions: list[Completion] = await of.generate(PROMPT, Sampling(n=16, max_tokens=60, seed=seed))
        if of is good:
            case.check(completions[0], PROMPT, 0)
        return sum(bool(np.isfinite(c.logprobs).all()) for c in completions)

    async def ask() -> None:
        await good.load_adapter(adapter)
        await bad.load_adapter(at_scale(adapter, 1e30))
        assert await finite(good, 1) == 16
        assert [await finite(bad, seed) for seed in (1, 100, 200)] == [0, 0, 0]
        assert [await finite(good, seed) for seed in (1, 100, 200, 300)] == [16] * 4
        both = await asyncio.gather(*(finite(of, 400 + i) for i, of in enumerate([bad, good] * 4)))
        assert both == [0, 16] * 4
        await engine.close()
        await bad.close()

    run(ask())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"dtype": "bfloat16"}, "dtype must be the same in all runs of an engine"),
        ({"model": "elsewhere"}, "model must be the same"),
        ({"truncates": True}, "truncates must be the same"),
    ],
)
def test_settings_of_the_engine_itself_must_be_the_same(other: dict[str, Any], message: str) -> None:
    own = settings(Path("/nowhere"))
    with pytest.raises(ValueError, match=message):
        common([own, dataclasses.replace(own, **other)])


def test_an_engine_of_several_runs_is_as_large_as_they_need() -> None:
    small = settings(Path("/nowhere"), stop=())
    large = dataclasses.replace(small, max_model_len=500, max_lora_rank=16, adapter_window=2, stop=("end",))
    found = common([small, large])
    assert (found.max_model_len, found.max_lora_rank, found.stop) == (500, 16, ("end",))
    assert (found.kv_cache_bytes, found.max_num_seqs, found.adapter_window) == (128 << 20, 128, 5)
    with pytest.raises(ValueError, match="in_flight=continue"):
        common([dataclasses.replace(small, in_flight="continue", adapter_window=1)] * 2)
    assert common([small]) is small


def _rank_4(model: Path) -> tuple[bytes, dict[str, Any]]:
    from examples.random_model import make_adapter

    return make_adapter(model, seed=77, rank=4)


class EngineReference:
    """The policy of one adapter in Hugging Face + PEFT."""

    def __init__(self, case: EngineCase, adapter: Adapter) -> None:
        self._case = object.__new__(EngineCase)
        self._case.model, self._case.adapters = case.model, [adapter]

    def logprobs(self, ids: list[int]) -> np.ndarray:
        return self._case.logprobs(0, ids)

    def check(self, completion: Completion, prompt: list[int]) -> None:
        self._case.check(completion, prompt, 0)
