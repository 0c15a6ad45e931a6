"""The fake must behave as the protocol says, or tests built on it prove nothing. A group that was sampled from
several policies is handed over once the newest of them is proven.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from rollout.engine import Engine, NoAdapter
from rollout.fakes import FakeEngine, make_group
from rollout.schema import Problem
from rollout.types import Adapter, AdapterCorrupt, Completion, EngineError, Sampling
from tests.rollout.test_producer import Story, Worker, consume, producing, push

PROMPT = [3, 1, 4]


def adapter(version: int) -> Adapter:
    return Adapter.build(version, b"weights %d" % version, {})


async def engine_at(version: int, **options: int | float) -> FakeEngine:
    engine = FakeEngine(16, **options)  # type: ignore[arg-type]
    assert await engine.load_adapter(adapter(version)) == adapter(version).digest
    return engine


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids.tolist() for c in completions]


async def test_completions_depend_on_prompt_seed_and_version_only() -> None:
    engine: Engine = await engine_at(0)
    sampling = Sampling(n=4, max_tokens=20, seed=7)
    first = tokens(await engine.generate(PROMPT, sampling))
    assert tokens(await engine.generate(PROMPT, sampling)) == first
    assert tokens(await (await engine_at(0)).generate(PROMPT, sampling)) == first
    assert tokens(await engine.generate([3, 1, 5], sampling)) != first
    assert tokens(await engine.generate(PROMPT, Sampling(n=4, max_tokens=20, seed=8)))[:3] == first[1:]
    assert tokens(await (await engine_at(1)).generate(PROMPT, sampling)) != first


async def test_logprobs_agree_with_the_probe() -> None:
    engine = await engine_at(0)
    for completion in await engine.generate(PROMPT, Sampling(n=8, max_tokens=20, seed=1)):
        probed = await engine.probe([*PROMPT, *completion.token_ids.tolist()])
        np.testing.assert_allclose(completion.logprobs, probed[len(PROMPT) - 1 :], rtol=1e-6)
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 0 else "length")
        assert 0 not in completion.token_ids[:-1]


async def test_greedy() -> None:
    engine = await engine_at(0)
    (greedy,) = await engine.generate(PROMPT, Sampling(n=1, max_tokens=1, temperature=0.0))
    others = [float((await engine.probe([*PROMPT, token]))[-1]) for token in range(engine.vocab_size)]
    assert int(greedy.token_ids[0]) == int(np.argmax(others))
    assert greedy.logprobs[0] == pytest.approx(float((await engine.probe([*PROMPT, int(greedy.token_ids[0])]))[-1]))


async def test_a_dropped_adapter_is_acknowledged_and_only_the_probe_tells() -> None:
    engine = FakeEngine(16, drop_adapter_at=1)
    await engine.load_adapter(adapter(0))
    before = await engine.probe(PROMPT)
    assert await engine.load_adapter(adapter(1)) == adapter(1).digest
    (completion,) = await engine.generate(PROMPT, Sampling(n=1, max_tokens=2))
    assert completion.versions.tolist() == [1] * len(completion.token_ids)
    assert np.array_equal(await engine.probe(PROMPT), before)
    await engine.load_adapter(adapter(2))
    assert not np.array_equal(await engine.probe(PROMPT), before)


async def test_a_call_in_flight_keeps_its_version() -> None:
    engine = await engine_at(0, delay_s=0.01)
    call = asyncio.create_task(engine.generate(PROMPT, Sampling(n=2, max_tokens=9, seed=1)))
    await asyncio.sleep(0)
    await engine.load_adapter(adapter(1))
    completions = await call
    assert [set(c.versions) for c in completions] == [{0}, {0}]
    assert tokens(completions) == tokens(
        await (await engine_at(0)).generate(PROMPT, Sampling(n=2, max_tokens=9, seed=1))
    )


async def test_asleep_it_does_nothing_and_awake_it_is_as_before() -> None:
    engine = await engine_at(0, delay_s=0.01)
    before = await engine.probe(PROMPT)
    call = asyncio.create_task(engine.generate(PROMPT, Sampling(n=1, max_tokens=2)))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="nothing may be running, got 1"):
        await engine.sleep()
    await call
    for _ in range(2):
        await engine.sleep()
    for refused in (engine.generate(PROMPT, Sampling(n=1, max_tokens=1)), engine.probe(PROMPT)):
        with pytest.raises(EngineError):
            await refused
    with pytest.raises(EngineError):
        await engine.load_adapter(adapter(1))
    for _ in range(2):
        await engine.wake()
    assert np.array_equal(await engine.probe(PROMPT), before)


async def test_it_fails_as_the_real_one_does() -> None:
    engine = FakeEngine(16)
    with pytest.raises(NoAdapter):
        await engine.generate(PROMPT, Sampling(n=1, max_tokens=1))
    with pytest.raises(AdapterCorrupt):
        await engine.load_adapter(Adapter(0, "0" * 64, b"x", {}))
    await engine.load_adapter(adapter(0))
    with pytest.raises(ValueError, match="at least 1"):
        await engine.generate([], Sampling(n=1, max_tokens=1))
    with pytest.raises(ValueError, match="at least 2"):
        await engine.probe([1])
    await engine.close()
    for call in (engine.generate(PROMPT, Sampling(n=1, max_tokens=1)), engine.probe(PROMPT)):
        with pytest.raises(EngineError):
            await call
    for late in (engine.load_adapter(adapter(1)), engine.sleep(), engine.wake()):
        with pytest.raises(EngineError):
            await late


# A group that was sampled from several policies is handed over once the newest of them is proven.


async def test_a_group_waits_for_the_proof_of_the_newest_policy_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def rollout(worker: Worker, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table:
        rows = [
            Completion(np.array([1], np.int32), np.array([-0.5], np.float32), "stop", np.array([version], np.int32))
            for version in (3, 4, 3)
        ]
        return make_group(problem.position, attempt=attempt, completions=rows, rewards=(1.0, 0.0, 0.5))

    monkeypatch.setattr(Worker, "rollout", rollout)
    story = Story(probe=lambda life, version: "slow" if version == 4 else None)
    async with producing(story, 1, tmp_path) as producer:
        assert await producer.feed.proof_of(3, 0)
        await producer.pipes.policy_slot.publish(4, push(4))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(producer.pipes.buffer) == 0
        story.gate.set()
        assert await consume(producer, 1) == [(0, 0)]
