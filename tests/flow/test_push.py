"""A push that is dropped or corrupted on its way to a real vLLM stops the run: real learner, real Ray, real engine."""

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.actor import Actor, RemoteError, RevivableActor, Shared
from cluster.buffer import Buffer, PolicySlot
from cluster.config import Deadlines
from cluster.placement import Role
from cluster.ray_cluster import connect
from cluster.telemetry import Timeline
from examples.random_model import make_tiny_model
from learner.config import RunConfig
from learner.driver.launch import sampling_of
from learner.driver.memory import settle
from learner.driver.roles import make_trainer, worker_spec
from learner.trainer.service import TrainerService
from rollout.data.chat import Chat
from rollout.data.problems import load
from rollout.delivery import Push
from rollout.engine import Engine, EngineSettings
from rollout.producer import Cursor, Pipes, Producer
from rollout.service import RolloutService
from rollout.types import Adapter
from rollout.vllm.environment import required_env
from rollout.worker import RolloutWorker, vllm_engine
from tests.pushes import expect

REWARD = "def spread(prompts, completions, **columns):\n    return [float(i) for i in range(len(completions))]\n"


class Forgetful:
    """A real engine that acknowledges version 2, its bytes included, and goes on with version 1."""

    def __init__(self, settings: EngineSettings) -> None:
        self._engine = vllm_engine(settings)

    async def load_adapter(self, adapter: Adapter) -> str:
        return adapter.digest if adapter.version == 2 else await self._engine.load_adapter(adapter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def forgetful(settings: EngineSettings) -> Engine:
    return Forgetful(settings)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    folder = tmp_path / "push"
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARD)
    (folder / "data.jsonl").write_text("".join(f'{{"question": "say {i}"}}\n' for i in range(8)))
    return RunConfig.model_validate(
        {
            "model": {"path": str(make_tiny_model(folder / "model")), "dtype": "float32"},
            "data": {"path": str(folder / "data.jsonl"), "eval": {"every": 0}},
            "rewards": [{"use": f"{folder}/rewards.py:spread"}],
            "rollout": {"num_generations": 4, "max_completion_length": 16, "kv_cache": "32MiB"},
            "learner": {"learning_rate": 4e-6, "groups_per_step": 2},
        }
    )


@pytest.fixture
async def processes(config: RunConfig) -> AsyncIterator[tuple[RevivableActor[RolloutService], Actor[TrainerService]]]:
    """A learner and a generator whose engine is forgetful, each in its process."""
    session = connect("local", min_cpus=2)
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # this file is no module in an actor's process
    roles = [Role("generator-0", 1, 0), Role("learner", 1, 0)]
    await session.reserve(roles, deadline_s=60)
    budgets = settle(config, Chat.load(config.model.path).config)
    spec = dataclasses.replace(worker_spec(config, 0, budgets), make_engine=forgetful)
    generator = session.spawn(roles[0], RolloutWorker, [spec], required_env(cuda=False))
    learner = session.spawn(roles[1], make_trainer, [config, 10, None], {})
    await asyncio.gather(generator.ready(120), learner.ready(120))
    yield generator, learner
    await generator.call(RolloutService.close, 30)
    await session.close()


async def push_of(learner: Actor[TrainerService], ids: Sequence[int]) -> Push:
    policy, exported = await learner.call(TrainerService.outgoing, 30)
    assert policy.value is None  # it is not in this process
    answer = expect(await learner.call(TrainerService.probe, 30, list(ids)))
    return Push(policy, exported.policy_id, tuple(ids), answer, "float32")


async def deliver(producer: Producer, push: Push) -> None:
    await producer.feed.deliver(push)
    await producer.feed.prove(push)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_push_that_does_not_arrive_stops_the_run(
    processes: tuple[RevivableActor[RolloutService], Actor[TrainerService]], config: RunConfig, tmp_path: Path
) -> None:
    generator, learner = processes
    problems, _ = load(config.data, Chat.load(config.model.path), 64, seed=0)
    timeline = Timeline(tmp_path / "timeline.json")
    pipes = Pipes(problems, Cursor(), Buffer(2, 0, 10**6, lambda group: None), PolicySlot(), timeline)
    producer = Producer(generator, pipes, sampling_of(config), Deadlines())
    ids = (problems.at(0).prompt_ids * 4)[:48]  # for the evidence of a few is none

    pushes = [await push_of(learner, ids)]
    await deliver(producer, pushes[0])
    for version in (1, 2):
        requests = [producer.request(problems.at(i), sampling_of(config)(i, 0), 0) for i in range(2)]
        groups = [group for group in await asyncio.gather(*requests) if group is not None]
        metrics = await learner.call(TrainerService.step, 60, groups)
        assert metrics["policy/mismatch_max"] < 1e-3
        pushes.append(await push_of(learner, ids))
        if version == 1:
            adapter = await pushes[1].policy.handle
            corrupt = dataclasses.replace(adapter, payload=bytes(adapter.payload)[:-4] + b"\1\1\1\1")
            with pytest.raises(
                RemoteError, match=r"generator-0: take_policy failed: AdapterCorrupt: adapter v1: the digest"
            ):
                await producer.feed.deliver(dataclasses.replace(pushes[1], policy=Shared(corrupt)))
            await deliver(producer, pushes[1])
    new, old = (push.expected.result().logprobs for push in pushes[:0:-1])
    assert 1e-4 < abs(new - old).max() < 1e-3  # one small step: the tolerance alone would let it pass
    with pytest.raises(
        RuntimeError, match=r"generator-0: acknowledged v2, but .* \d+ of \d+ differ, first .*layers\.0"
    ):
        await deliver(producer, pushes[2])
    # An engine that lies of its tensors too gives itself away by what it says of the probe.
    answer = await generator.call(RolloutService.probe, 30, ids)
    lie = answer._replace(held=pushes[2].expected.result().held)
    with pytest.raises(RuntimeError, match=r"generator-0: acknowledged v2, but generates as under v1: .* nats"):
        await pushes[2].verify("generator-0", lie, producer.feed.evidence)
