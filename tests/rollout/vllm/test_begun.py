"""Completions that are stopped in vLLM and go on from there, against Hugging Face + PEFT."""

from __future__ import annotations

import asyncio

import numpy as np

from rollout.partial import Sampler, go_on
from rollout.types import Completion, Sampling
from tests.rollout.house import (
    GROUP,
    PROMPT,
    TOLERANCE,
    House,
    check_that_there_is_nothing,
    never,
    run,
    stopped_before_its_turn,
)

STEPS = 60


async def stopped_in_the_middle(house: House) -> list[Completion]:
    """A group of 16 after about STEPS steps of the engine."""
    loop, sampled_some = asyncio.get_running_loop(), asyncio.Event()
    vllm = house.engine._thread._engine
    step, steps = vllm.step, iter(range(10_000))

    def counted_step() -> list[object]:
        if next(steps) == STEPS:
            loop.call_soon_threadsafe(sampled_some.set)
        outputs: list[object] = step()
        return outputs

    vllm.step = counted_step
    sampler = Sampler(house.engine)
    group = asyncio.create_task(sampler.sample("a", PROMPT, GROUP, ()))
    await sampled_some.wait()
    begun = await sampler.stop("a")
    vllm.step = step
    assert await group is None
    return begun


def test_what_is_stopped_goes_on_as_if_it_never_was(house: House) -> None:
    async def scenario() -> tuple[list[Completion], list[Completion], list[Completion]]:
        begun = await stopped_in_the_middle(house)
        engine = house.engine._thread._engine
        assert not engine.has_unfinished_requests()
        assert not engine.output_processor.parent_requests
        assert not house.engine._thread._running
        never_stopped = await house.engine.generate(PROMPT, GROUP)
        whole = await go_on(house.engine, PROMPT, Sampling(16, 300, seed=500), begun, never())
        return begun, never_stopped, whole

    begun, never_stopped, whole = run(scenario())
    assert {"stop", "abort"} <= {completion.finish_reason for completion in begun}
    differ = []
    for first, second, completion in zip(begun, never_stopped, whole, strict=True):
        at = len(first.token_ids)
        assert first.token_ids.tolist() == second.token_ids[:at].tolist() == completion.token_ids[:at].tolist()
        if first.finish_reason != "abort":
            assert completion is first
            continue
        assert completion.finish_reason in ("stop", "length")
        assert STEPS <= at < len(completion.token_ids) <= 300
        assert completion.versions.tolist() == [house.newest] * len(completion.token_ids)
        probed = run(house.engine.probe([*PROMPT, *completion.token_ids.tolist()]))
        assert np.abs(completion.logprobs - probed[len(PROMPT) - 1 :]).max() < TOLERANCE
        differ.append(completion.token_ids[at:].tolist() != second.token_ids[at:].tolist())
    assert sum(differ) > len(differ) / 2, "the seed is another"
    house.check(max(whole, key=lambda completion: len(completion.token_ids)), PROMPT, house.newest)


def test_it_goes_on_under_a_newer_policy_and_tells_which_token_is_whose(house: House) -> None:
    async def scenario() -> tuple[list[Completion], list[Completion]]:
        begun = await stopped_in_the_middle(house)
        await house.engine.load_adapter(house.next_adapter())
        return begun, await go_on(house.engine, PROMPT, Sampling(16, 300, seed=500), begun, never())

    begun, whole = run(scenario())
    old, new = house.newest - 1, house.newest
    pairs = [(f, c) for f, c in zip(begun, whole, strict=True) if f.finish_reason == "abort"]
    assert pairs
    for first, completion in pairs[:4]:
        at, ids = len(first.token_ids), PROMPT + completion.token_ids.tolist()
        assert completion.versions.tolist() == [old] * at + [new] * (len(completion.token_ids) - at)
        own = [house.logprobs(version, ids)[len(PROMPT) - 1 :] for version in (old, new)]
        assert np.abs(completion.logprobs - own[0])[:at].max() < TOLERANCE
        assert np.abs(completion.logprobs - own[1])[at:].max() < TOLERANCE


def test_a_call_that_is_stopped_before_its_turn_has_nothing(house: House) -> None:
    check_that_there_is_nothing(run(stopped_before_its_turn(house)))
