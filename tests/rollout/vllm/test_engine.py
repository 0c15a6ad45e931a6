"""What VllmEngine samples, and under which adapter, against Hugging Face + PEFT."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from examples.random_model import EOS_IDS, VOCAB_SIZE
from rollout.types import Completion, Sampling
from tests.rollout.engine_case import PROMPT, TOLERANCE, EngineCase, run


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampled_distribution(case: EngineCase, temperature: float) -> None:
    completions = run(case.engine.generate(PROMPT, Sampling(n=4, max_tokens=48, temperature=temperature)))
    assert len(completions) == 4
    assert len({tuple(c.token_ids) for c in completions}) == 4
    for completion in completions:
        assert (str(completion.token_ids.dtype), str(completion.logprobs.dtype)) == ("int32", "float32")
        case.check(completion, PROMPT, case.newest, temperature)


def test_greedy_takes_the_likeliest_token(case: EngineCase) -> None:
    (completion,) = run(case.engine.generate(PROMPT, Sampling(n=1, max_tokens=8, temperature=0.0)))
    case.check(completion, PROMPT, case.newest)
    best = max(float(run(case.engine.probe([*PROMPT, token]))[-1]) for token in range(0, VOCAB_SIZE, 5))
    assert completion.logprobs[0] >= best - TOLERANCE


def test_probe_equals_the_reference(case: EngineCase) -> None:
    ids = [*PROMPT, *range(100, 160)]
    found = run(case.engine.probe(ids))
    assert (found.shape, str(found.dtype)) == ((len(ids) - 1,), "float32")
    assert np.abs(found - case.logprobs(case.newest, ids)).max() < TOLERANCE


def test_a_probe_in_the_midst_of_completions_disturbs_neither(case: EngineCase) -> None:
    """As in asynchronous training, where each push is probed while groups are under way."""
    ids = [*PROMPT, *range(100, 160)]

    async def ask() -> tuple[list[Completion], np.ndarray]:
        generating = asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=16, max_tokens=400, seed=0)))
        await asyncio.sleep(0.05)
        answer = await case.engine.probe(ids)
        assert not generating.done(), "the probe must have shared its step with completions"
        return await generating, answer

    completions, found = run(ask())
    assert np.abs(found - case.logprobs(case.newest, ids)).max() < TOLERANCE
    for completion in completions:
        case.check(completion, PROMPT, case.newest)


def test_both_end_tokens_end_a_completion(case: EngineCase) -> None:
    completions = run(case.engine.generate(PROMPT, Sampling(n=48, max_tokens=400, seed=0)))
    last = {int(c.token_ids[-1]) for c in completions if c.finish_reason == "stop"}
    assert last == set(EOS_IDS)
    for c in completions:
        assert not set(c.token_ids[:-1].tolist()) & set(EOS_IDS)
        assert (c.finish_reason == "stop") == (int(c.token_ids[-1]) in EOS_IDS)


def test_seeds_decide_the_tokens(case: EngineCase) -> None:
    def tokens(seed: int) -> list[list[int]]:
        return [
            c.token_ids.tolist() for c in run(case.engine.generate(PROMPT, Sampling(n=4, max_tokens=24, seed=seed)))
        ]

    once = tokens(1000)
    assert tokens(1000) == once
    assert tokens(2000) != once
    assert tokens(1001)[:3] == once[1:], "completion j is sampled with seed + j, so callers keep a stride of n"


def test_forty_seeded_prompts_at_once(case: EngineCase) -> None:
    """Their prefill exceeds one step's token budget: splitting a seeded one kills vLLM on CPU."""

    async def ask() -> list[list[Completion]]:
        prompts = [[i, *range(250), *range(100)] for i in range(40)]
        sampling = [Sampling(n=2, max_tokens=4, seed=10 * i) for i in range(40)]
        return await asyncio.gather(*map(case.engine.generate, prompts, sampling))

    groups = run(ask())
    assert [len(group) for group in groups] == [2] * 40
    case.check(groups[7][1], [7, *range(250), *range(100)], case.newest)


def test_a_new_adapter_governs_the_next_call_despite_the_prefix_cache(case: EngineCase) -> None:
    prompt = [i % 256 for i in range(300)]  # several full KV blocks, so the cache really has something to leak
    (old,) = run(case.engine.generate(prompt, Sampling(n=1, max_tokens=24, seed=5)))
    case.check(old, prompt, case.newest)
    run(case.engine.load_adapter(case.next_adapter()))
    (new,) = run(case.engine.generate(prompt, Sampling(n=1, max_tokens=24, seed=5)))
    case.check(new, prompt, case.newest)
    assert np.abs(case.logprobs(case.newest, prompt) - case.logprobs(case.newest - 1, prompt)).max() > 0.1


def test_calls_in_flight_finish_on_the_version_they_began_with(case: EngineCase) -> None:
    async def swap() -> tuple[list[Completion], list[Completion]]:
        adapter = case.next_adapter()  # made beforehand: it takes as long as a short generation
        before = asyncio.create_task(case.engine.generate(PROMPT, Sampling(n=16, max_tokens=400, seed=0)))
        await asyncio.sleep(0.05)
        await case.engine.load_adapter(adapter)
        assert not before.done(), "the swap must happen while the first call runs"
        after = await case.engine.generate(PROMPT, Sampling(n=4, max_tokens=12))
        assert not before.done(), "both versions must have been decoded in the same steps"
        return await before, after

    before, after = run(swap())
    for completion in before:
        case.check(completion, PROMPT, case.newest - 1)
    for completion in after:
        case.check(completion, PROMPT, case.newest)
