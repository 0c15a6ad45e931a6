"""Completions that are stopped in vLLM and go on from there, against Hugging Face + PEFT."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np

from rollout.engine import Completion, Sampling
from rollout.partial import Sampler, go_on
from tests.rollout.house import PROMPT, TOLERANCE, House, run
from tests.tiny import make_tiny_model

STEPS = 60
FIRST = Sampling(n=16, max_tokens=300, seed=0)


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
    group = asyncio.create_task(sampler.sample("a", PROMPT, FIRST, ()))
    await sampled_some.wait()
    begun = await sampler.stop("a")
    vllm.step = step
    assert await group is None
    return begun


async def never() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


def test_what_is_stopped_goes_on_as_if_it_never_was(house: House) -> None:
    async def scenario() -> tuple[list[Completion], list[Completion], list[Completion]]:
        begun = await stopped_in_the_middle(house)
        engine = house.engine._thread._engine
        assert not engine.has_unfinished_requests()
        assert not engine.output_processor.parent_requests
        assert not house.engine._thread._running
        never_stopped = await house.engine.generate(PROMPT, FIRST)
        return (
            begun,
            never_stopped,
            await go_on(house.engine, PROMPT, Sampling(16, 300, seed=500), begun, await never()),
        )

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
        return begun, await go_on(house.engine, PROMPT, Sampling(16, 300, seed=500), begun, await never())

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


async def stopped_before_its_turn(house: House) -> list[Completion]:
    """A group that nobody wants any more when the engine hears of it."""
    vllm, gate, waits = house.engine._thread._engine, threading.Event(), asyncio.Event()
    step, loop = vllm.step, asyncio.get_running_loop()

    def gated_step() -> list[object]:
        loop.call_soon_threadsafe(waits.set)
        gate.wait()
        outputs: list[object] = step()
        return outputs

    vllm.step = gated_step
    before = asyncio.create_task(house.engine.generate(PROMPT, Sampling(n=1, max_tokens=2)))
    await waits.wait()
    until = await never()
    until.set_result(None)
    group = asyncio.create_task(house.engine.generate(PROMPT, FIRST, until))
    for _ in range(5):
        await asyncio.sleep(0)
    gate.set()
    completions = await group
    await before
    vllm.step = step
    return completions


def check_that_there_is_nothing(completions: list[Completion]) -> None:
    arrays = [(len(c.token_ids), len(c.logprobs), len(c.versions), c.finish_reason) for c in completions]
    assert arrays == [(0, 0, 0, "abort")] * 16


def test_a_call_that_is_stopped_before_its_turn_has_nothing(house: House) -> None:
    check_that_there_is_nothing(run(stopped_before_its_turn(house)))


def test_in_flight_continue_tells_the_versions_of_a_beginning_too(tmp_path: Path) -> None:
    house = House(make_tiny_model(tmp_path), in_flight="continue", adapter_window=1)

    async def scenario() -> list[Completion]:
        await house.engine.load_adapter(house.next_adapter())
        until = await never()
        begun = asyncio.create_task(house.engine.generate(PROMPT, FIRST, until))
        await asyncio.sleep(0.1)
        await house.engine.load_adapter(house.next_adapter())
        await house.engine.probe(PROMPT)  # a step later at the earliest
        until.set_result(None)
        return await begun

    try:
        stopped = [completion for completion in run(scenario()) if completion.finish_reason == "abort"]
        assert stopped
        for completion in stopped:
            assert len(completion.versions) == len(completion.token_ids) == len(completion.logprobs)
            assert sorted(set(completion.versions.tolist())) == [0, 1]
            assert (np.diff(completion.versions) >= 0).all()
        check_that_there_is_nothing(run(stopped_before_its_turn(house)))
    finally:
        run(house.engine.close())
