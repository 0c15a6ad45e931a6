"""Completions that are stopped in vLLM and go on from there, against Hugging Face + PEFT."""

from __future__ import annotations

import asyncio

import numpy as np

from rollout.partial import Sampler, go_on
from rollout.types import Completion, Sampling
from tests.rollout.engine_case import (
    GROUP,
    PROMPT,
    TOLERANCE,
    EngineCase,
    check_that_there_is_nothing,
    never,
    run,
    stopped_before_its_turn,
)

STEPS = 60


async def stopped_in_the_middle(case: EngineCase) -> list[Completion]:
    """A group of 16 after about STEPS steps of the engine."""
    loop, sampled_some = asyncio.get_running_loop(), asyncio.Event()
    vllm = case.engine._thread._turns.engine
    step, steps = vllm.step, iter(range(10_000))

    def counted_step() -> list[object]:
        if next(steps) == STEPS:
            loop.call_soon_threadsafe(sampled_some.set)
        outputs: list[object] = step()
        return outputs

    vllm.step = counted_step
    sampler = Sampler(case.engine)
    group = asyncio.create_task(sampler.sample("a", PROMPT, GROUP, ()))
    await sampled_some.wait()
    begun = await sampler.stop("a")
    vllm.step = step
    assert await group is None
    return begun


def test_what_is_stopped_goes_on_as_if_it_never_was(case: EngineCase) -> None:
    async def scenario() -> tuple[list[Completion], list[Completion], list[Completion]]:
        begun = await stopped_in_the_middle(case)
        engine = case.engine._thread._turns.engine
        assert not engine.has_unfinished_requests()
        assert not engine.output_processor.parent_requests
        assert not case.engine._thread._turns.running
        never_stopped = await case.engine.generate(PROMPT, GROUP)
        whole = await go_on(case.engine, PROMPT, Sampling(16, 300, seed=500), begun, never())
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
        assert completion.versions.tolist() == [case.newest] * len(completion.token_ids)
        probed = run(case.engine.probe([*PROMPT, *completion.token_ids.tolist()]))
        assert np.abs(completion.logprobs - probed[len(PROMPT) - 1 :]).max() < TOLERANCE
        differ.append(completion.token_ids[at:].tolist() != second.token_ids[at:].tolist())
    assert sum(differ) > len(differ) / 2, "the seed is another"
    case.check(max(whole, key=lambda completion: len(completion.token_ids)), PROMPT, case.newest)


def test_it_goes_on_under_a_newer_policy_and_tells_which_token_is_whose(case: EngineCase) -> None:
    async def scenario() -> tuple[list[Completion], list[Completion]]:
        begun = await stopped_in_the_middle(case)
        await case.engine.load_adapter(case.next_adapter())
        return begun, await go_on(case.engine, PROMPT, Sampling(16, 300, seed=500), begun, never())

    begun, whole = run(scenario())
    old, new = case.newest - 1, case.newest
    pairs = [(f, c) for f, c in zip(begun, whole, strict=True) if f.finish_reason == "abort"]
    assert pairs
    for first, completion in pairs[:4]:
        at, ids = len(first.token_ids), PROMPT + completion.token_ids.tolist()
        assert completion.versions.tolist() == [old] * at + [new] * (len(completion.token_ids) - at)
        own = [case.logprobs(version, ids)[len(PROMPT) - 1 :] for version in (old, new)]
        assert np.abs(completion.logprobs - own[0])[:at].max() < TOLERANCE
        assert np.abs(completion.logprobs - own[1])[at:].max() < TOLERANCE


def test_a_call_that_is_stopped_before_its_turn_has_nothing(case: EngineCase) -> None:
    check_that_there_is_nothing(run(stopped_before_its_turn(case)))
