"""Whole weights into a running vLLM: equal to the model loaded afresh, tied or not, and never mixed with the old; and
weights merged with an adapter: equal to the adapter."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from examples.random_model import make_adapter, make_tiny_model
from rollout.engine import AdapterRefused, NoAdapter
from rollout.types import AdapterCorrupt, Completion, Sampling, Weights
from rollout.vllm.engine import Load, VllmEngine
from rollout.weights import Source, WeightsFile, WeightsReader
from tests.rollout.engine_case import TOLERANCE, EngineCase, run, settings

WEIGHTS = "model.safetensors"
LONG = [i % 250 for i in range(300)]  # several of the cache's blocks
IDS = list(range(40, 80))


def weights_of(model: Path, version: int) -> Weights:
    return Weights.build(version, (model / WEIGHTS).read_bytes())


def logprobs(model: Path, ids: list[int]) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    tokens = torch.tensor([ids])
    with torch.no_grad():
        rows = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits[0, :-1].log_softmax(-1)
    return np.asarray(rows.gather(-1, tokens[0, 1:, None])[:, 0])


def off(model: Path, prompt: list[int], completion: Completion) -> float:
    expected = logprobs(model, prompt + completion.token_ids.tolist())[len(prompt) - 1 :]
    return float(np.abs(completion.logprobs - expected).max())


def test_new_weights_replace_the_model_between_requests(tmp_path: Path) -> None:
    """Its embeddings are tied; weights that are not are read back in test_held.py."""
    models = [make_tiny_model(tmp_path / str(seed), seed=seed, tied=True) for seed in range(3)]
    engine = VllmEngine(settings(models[0], max_lora_rank=0))
    sampling = Sampling(n=2, max_tokens=40, seed=1)

    async def story() -> tuple[list[Completion], list[Completion]]:
        with pytest.raises(NoAdapter):
            await engine.probe(IDS)
        for version in (0, 1):
            weights = weights_of(models[version], version) if version else Weights.unchanged(version)
            assert await engine.load_weights(weights) == weights.digest
            assert await engine.load_weights(weights) == weights.digest  # again: nothing happens
            assert np.abs(await engine.probe(IDS) - logprobs(models[version], IDS)).max() < TOLERANCE
        before = asyncio.create_task(engine.generate(LONG, sampling))
        await asyncio.sleep(0)
        loading = asyncio.create_task(engine.load_weights(weights_of(models[2], 2)))
        backlog = engine._thread._turns.backlog
        while not (any(isinstance(command, Load) for command in backlog) or loading.done()):  # staged, and waiting
            await asyncio.sleep(0.001)
        after = await engine.generate(LONG, sampling)
        await loading
        return await before, after

    try:
        before, after = run(story())
        assert [set(c.versions) for c in before] == [{1}, {1}]
        assert [set(c.versions) for c in after] == [{2}, {2}]
        assert max(off(models[1], LONG, c) for c in before) < TOLERANCE
        assert max(off(models[2], LONG, c) for c in after) < TOLERANCE  # and the cached prefix of before is not used
        good = weights_of(models[0], 3)
        with pytest.raises(AdapterCorrupt, match="weights v3: the digest"):
            run(engine.load_weights(dataclasses.replace(good, payload=bytes(good.payload[:-1]) + b"x")))
        with pytest.raises(AdapterRefused, match="its version must be above"):
            run(engine.load_weights(weights_of(models[0], 1)))
        from rollout.types import Adapter

        with pytest.raises(AdapterRefused, match="takes whole weights only"):
            run(engine.load_adapter(Adapter.build(4, *make_adapter(models[0], seed=1))))
        assert np.abs(run(engine.probe(IDS)) - logprobs(models[2], IDS)).max() < TOLERANCE
        _the_engine_keeps_nothing_of_the_memory_that_it_was_loaded_from(engine, models[0])
    finally:
        run(engine.close())


def _the_engine_keeps_nothing_of_the_memory_that_it_was_loaded_from(engine: VllmEngine, model: Path) -> None:
    file, sources = WeightsFile(), {name: Source.of(value) for name, value in load_file(model / WEIGHTS).items()}
    place = file.pack(5, sources, torch.float32)
    assert run(WeightsReader().load(place, engine.load_weights)) == place.digest
    zeros = {name: Source.of(torch.zeros(source.shape)) for name, source in sources.items()}
    for version in (6, 7):
        file.pack(version, zeros, torch.float32)
    assert np.abs(run(engine.probe(IDS)) - logprobs(model, IDS)).max() < TOLERANCE
    assert "gleaner-weights" not in Path("/proc/self/maps").read_text()
    file.close()


IN_PART = ["q_proj", "v_proj", "up_proj"]  # of layers that vLLM fuses


@pytest.mark.parametrize("rank", [0, pytest.param(8, marks=pytest.mark.long)])
def test_an_adapter_is_in_force_merged_or_not(tmp_path: Path, rank: int) -> None:
    """Twice, as the second is merged into the base and not into the first."""
    path = make_tiny_model(tmp_path, family="Qwen2", tied=True)
    case = EngineCase(path, targets=IN_PART, max_lora_rank=rank)
    answers = []
    try:
        for version in (0, 1):
            run(case.push())
            answers.append(run(case.engine.probe(IDS)))
            assert np.abs(answers[-1] - case.logprobs(version, IDS)).max() < 1e-5
    finally:
        run(case.engine.close())
    assert np.abs(answers[1] - answers[0]).max() > 0.1
