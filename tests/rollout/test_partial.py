"""A group that is stopped is continued from what its worker has of it, on any worker."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from cluster.actor import ActorDied, Local
from cluster.buffer import Buffer
from cluster.config import DeadlineConfig
from cluster.policy_slot import PolicySlot
from cluster.telemetry import Timeline
from rollout.data.cursor import Cursor
from rollout.fake_engine import FakeEngine
from rollout.fake_groups import make_group, make_problem
from rollout.partial import Begun, Sampler
from rollout.producer import Pipes, Producer, group_seed
from rollout.schema import Problem, group_position, ragged
from rollout.types import Adapter, Completion, Sampling
from rollout.weight_sync import Answer, Push, Receipt
from tests.pushes import expect

VOCAB, PROMPT = 12, (3, 1, 4)
NEVER = 1e6  # seconds
LONG = Sampling(n=16, max_tokens=24, seed=70)


def adapter(version: int) -> Adapter:
    return Adapter.build(version, b"weights %d" % version, {})


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def stopped(engine: FakeEngine, begun: Begun = (), how: Sampling = LONG) -> list[Completion]:
    """What is there of a group that is stopped in the middle."""
    sampler = Sampler(engine)
    sampling = asyncio.create_task(sampler.sample("a", PROMPT, how, begun))
    await settle()
    completions = await sampler.stop("a")
    assert await sampling is None
    assert await sampler.stop("a") == []
    return completions


def tokens(completion: Completion) -> list[int]:
    return completion.token_ids.tolist()  # type: ignore[no-any-return]


async def test_what_is_whole_stays_and_the_rest_goes_on_behind_its_last_token() -> None:
    slow, quick = FakeEngine(VOCAB, delay_s=NEVER), FakeEngine(VOCAB)
    for engine in (slow, quick):
        await engine.load_adapter(adapter(0))
    begun = await stopped(slow)
    for first, never_stopped in zip(begun, await quick.generate(PROMPT, LONG), strict=True):
        assert tokens(first) == tokens(never_stopped)[: len(first.token_ids)]
        assert first.finish_reason == ("abort" if len(never_stopped.token_ids) > 12 else never_stopped.finish_reason)
    assert {"stop", "abort"} == {first.finish_reason for first in begun}
    await quick.load_adapter(adapter(1))
    after = Sampling(n=16, max_tokens=24, seed=900)
    whole = await Sampler(quick).sample("b", PROMPT, after, begun)
    assert whole is not None
    for j, (first, completion) in enumerate(zip(begun, whole, strict=True)):
        if first.finish_reason == "stop":
            assert completion is first
            continue
        at = len(first.token_ids)
        rest = Sampling(n=1, max_tokens=24 - at, seed=900 + j)
        (more,) = await quick.generate([*PROMPT, *tokens(first)], rest)
        assert tokens(completion) == tokens(first) + tokens(more)
        np.testing.assert_array_equal(completion.logprobs, [*first.logprobs, *more.logprobs])
        assert completion.versions.tolist() == [0] * at + [1] * len(more.token_ids)
        assert completion.finish_reason == ("stop" if tokens(completion)[-1] == 0 else "length")
        assert len(completion.token_ids) <= 24


async def test_stopped_again_it_is_longer_and_a_whole_group_leaves_nothing() -> None:
    slow = FakeEngine(VOCAB, delay_s=NEVER)
    await slow.load_adapter(adapter(0))
    begun = await stopped(slow)
    await slow.load_adapter(adapter(1))
    again = await stopped(slow, begun)
    for first, second in zip(begun, again, strict=True):
        grown = len(second.token_ids) - len(first.token_ids)
        assert grown > 0 if first.finish_reason == "abort" else second is first
        assert tokens(second)[: len(first.token_ids)] == tokens(first)
        assert second.versions.tolist() == [0] * len(first.token_ids) + [1] * grown
    short = next(j for j, first in enumerate(begun) if first.finish_reason == "stop")
    await slow.load_adapter(adapter(0))
    assert await stopped(slow, how=Sampling(n=1, max_tokens=24, seed=70 + short)) == []


class Worker:
    """A RolloutWorker without tokenizer and reward functions."""

    def __init__(self, delay_s: float) -> None:
        self.engine = FakeEngine(VOCAB, delay_s=delay_s)
        self.sampler = Sampler(self.engine)
        self.asked: list[Begun] = []
        self.stops: list[str] = []
        self.lost, self.proving = False, asyncio.Event()
        self.proving.set()

    async def take_policy(self, policy: Adapter) -> Receipt:
        return Receipt(await self.engine.load_adapter(policy), 0.0, 0.0)

    async def probe(self, token_ids: Sequence[int]) -> Answer:
        await self.proving.wait()
        return Answer(await self.engine.probe(token_ids), await self.engine.held(), 0.0)

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int, begun: Begun) -> pa.Table | None:
        self.asked.append(begun)
        name = problem.group_id(attempt)
        completions = await self.sampler.sample(name, problem.prompt_ids, sampling, begun)
        if completions is None:
            return None
        return make_group(problem.position, attempt=attempt, completions=completions, rewards=[0.0] * 8)

    async def stop(self, group_id: str) -> list[Completion]:
        self.stops.append(group_id)
        if self.lost:
            raise ActorDied("it is gone")
        return await self.sampler.stop(group_id)


class Stream:
    def __len__(self) -> int:
        return 1000

    def at(self, position: int) -> Problem:
        return make_problem(position, prompt_ids=(position % VOCAB, 1, 5, 2))


class Team:
    """A slow worker that never ends a group and a quick one, over one Buffer; they are asked in that order."""

    def __init__(self, folder: Path, buffer: Buffer) -> None:
        self.buffer, self.version = buffer, -1
        self.pipes = Pipes(Stream(), Cursor(), buffer, PolicySlot(), Timeline(folder / "timeline.json"))
        actors = [Local("slow", Worker, [NEVER]), Local("quick", Worker, [0.0])]
        self.slow, self.quick = (actor._object for actor in actors)
        self.producers = [
            Producer(cast(Local[Any], actor), self.pipes, self.sampling, DeadlineConfig()) for actor in actors
        ]

    def sampling(self, position: int, attempt: int) -> Sampling:
        return Sampling(n=8, max_tokens=24, seed=group_seed(0, position, attempt))

    async def push(self) -> None:
        """The next policy, to all."""
        self.version += 1
        teller = FakeEngine(VOCAB)
        await teller.load_adapter(adapter(self.version))
        told = expect(Answer(await teller.probe((1, 2)), await teller.held(), 0.0))
        await self.pipes.policy_slot.publish(self.version, Push(adapter(self.version), (1, 2), told, "float32"))
        await settle()

    async def learn(self) -> pa.Table:
        """One step on one group, and the policy that comes of it."""
        (group,) = (await self.buffer.take(1, self.version)).groups
        await settle()  # what is stopped now is so under this policy
        await self.push()
        self.buffer.release(1)
        await settle()
        return group


@asynccontextmanager
async def team(folder: Path, buffer: Buffer, proven: bool = True) -> AsyncIterator[Team]:
    """A team under policy v0, which the slow worker may be late to prove."""
    members = Team(folder, buffer)
    if not proven:
        members.slow.proving.clear()
    await members.push()
    tasks = [asyncio.create_task(producer.run(2)) for producer in members.producers]
    await settle()
    yield members
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    members.pipes.timeline.close()


async def test_a_stopped_group_is_continued_by_the_worker_that_is_free(tmp_path: Path) -> None:
    async with team(tmp_path, Buffer(1, 0, 2**20, print, oversample=1)) as members:
        assert group_position(await members.learn()) == (1, 0)  # of the quick one, and the slow one is stopped
        assert members.slow.stops == ["0-0-0"]
        begun = members.quick.asked[1]
        metrics = members.pipes.partial_rollouts.metrics()
        assert (metrics["rollout/early_stopped"], metrics["rollout/resumed"]) == (1, 8)
        assert metrics["rollout/resumed_tokens"] == sum(len(first.token_ids) for first in begun) > 0
        assert members.pipes.partial_rollouts.begun == {}  # it lies whole in the buffer
        assert [slot.oldest for slot in members.buffer._admission.admitted if slot in members.buffer._groups] == [0]
        group = await members.learn()
        assert group_position(group) == (0, 1)
    assert any(first.finish_reason == "abort" for first in begun)
    columns = ("completion_ids", "behavior_logprobs", "token_versions")
    for first, ids, logprobs, versions in zip(begun, *(ragged(group, name) for name in columns), strict=True):
        at = len(first.token_ids)
        assert ids[:at].tolist() == tokens(first)
        assert logprobs[:at].tolist() == first.logprobs.tolist()
        assert versions.tolist() == [0] * at + [1] * (len(ids) - at)
        assert (len(ids) > at) == (first.finish_reason == "abort")


async def test_nothing_goes_on_from_a_policy_that_is_not_proven(tmp_path: Path) -> None:
    async with team(tmp_path, Buffer(1, 0, 2**20, print, oversample=1), proven=False) as members:
        await members.buffer.take(1, 0)
        await settle()
        assert (members.slow.stops, members.pipes.partial_rollouts.begun) == (["0-0-0"], {})
        members.slow.proving.set()
        await settle()
        assert list(members.pipes.partial_rollouts.begun) == [0]


async def test_without_an_answer_of_its_worker_a_stopped_group_begins_anew(tmp_path: Path) -> None:
    async with team(tmp_path, Buffer(1, 0, 2**20, print, oversample=1)) as members:
        members.slow.lost = True
        await members.learn()
        group = await members.learn()
        assert (group_position(group), members.pipes.partial_rollouts.begun) == ((0, 1), {})
    assert {int(version) for versions in ragged(group, "token_versions") for version in versions} == {1}
