"""Composition: what the configuration says reaches sampler, engine and learner, each value where it belongs."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from cluster.actor import Local
from cluster.config import RewardProcessConfig
from cluster.placement import Role
from learner.algo.surrogates import LossConfig
from learner.config import RunConfig, roles
from learner.config.arrangement import ARRANGEMENTS
from learner.driver import launch
from learner.driver.console import Phases
from learner.driver.failure import LearnerLost
from learner.driver.launch import sampling_of
from learner.driver.memory import Budgets
from learner.driver.process import ENDS
from learner.driver.roles import (
    CHILDREN_END_BY_THEMSELVES,
    make_trainer,
    spawn_rewards,
    worker_spec,
)
from rewards.config import functions_of
from rewards.pool import Judging, RewardServer
from rollout.scorer import RewardProcesses
from rollout.types import Sampling, group_seed
from tests.learner import naive
from tests.learner.trainers import MAX_LENGTH, TEMPERATURE, advantages_by_hand, distance, gradient, naive_gradient

LOSS = {"kind": "dr_grpo", "ratio": "clip", "advantage": "none"}  # whose constant is max_completion_length


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """What a run does about requests to end stays with it: the handlers of this process are as they were."""
    before = {number: signal.getsignal(number) for number in ENDS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def config_of(path: str, adapter: str | None = None) -> RunConfig:
    """No value is a default, nor equal to another."""
    return RunConfig.model_validate(
        {
            "name": "seeded{seed}",
            "seed": 3,
            "max_staleness": 2,
            "model": {"path": path, "dtype": "float32", "adapter": adapter},
            "data": {"path": "rg:chain_sum"},
            "rewards": [{"use": "number"}, {"use": "format", "weight": 0.5}],
            "rollout": {
                "num_generations": 6,
                "max_prompt_length": 40,
                "max_completion_length": MAX_LENGTH,
                "temperature": TEMPERATURE,
                "max_num_seqs": 11,
                "reward_workers": 2,
                "process_memory": "5GiB",
                "stop": ["\n\n"],
            },
            "learner": {"lora": {"rank": 8, "alpha": 16}, "loss": LOSS, "optimizer": {"max_grad_norm": 1e9}},
        }
    )


def test_each_group_is_sampled_as_configured_with_a_seed_of_its_own() -> None:
    sampling = sampling_of(config_of("m"))
    seed = group_seed(3, 7, 1)
    assert sampling(7, 1) == Sampling(n=6, max_tokens=MAX_LENGTH, temperature=TEMPERATURE, seed=seed)
    assert len({seed, sampling(1, 7).seed, sampling(7, 2).seed, sampling(8, 1).seed}) == 4


def test_a_generator_is_built_from_its_settings() -> None:
    config = config_of("m")
    budgets = Budgets(config.learner, 12345, 11, None, 0, ARRANGEMENTS["separate"], None, "")
    spec = worker_spec(config, 4, budgets)
    assert (spec.rank, spec.run_id, spec.rewards) == (4, "seeded3", tuple(functions_of(config.rewards)))
    assert [(reward.use, reward.name, reward.weight) for reward in spec.rewards] == [
        ("number", "number", 1.0), ("format", "format", 0.5)
    ]  # fmt: skip
    assert (spec.reward_workers, spec.reward_memory) == (2, 5 * 2**30)
    assert spec.judged == Judging(config.run_dir / "judged", 1 / config.rollout.workers)
    engine = spec.engine
    assert (engine.model, engine.dtype, engine.stop) == ("m", "float32", ("\n\n",))
    assert (engine.max_model_len, engine.kv_cache_bytes, engine.max_num_seqs) == (40 + MAX_LENGTH, 12345, 11)
    assert (engine.max_lora_rank, engine.adapter_window, engine.seed) == (8, 2 + 2, 3 * 1000 + 4)
    large = worker_spec(config.model_copy(update={"seed": 2**31 - 1}), 4, budgets).engine.seed
    assert 2**31 < large < 2**32  # numpy takes no more


def test_reward_processes_of_their_own_get_the_functions_and_generators_get_them() -> None:
    """One at a time beside the other settings: each has its cores, cards and share of the judges' requests."""
    config = config_of("m")
    rewards = RewardProcessConfig(processes=2, cpus=3, gpus=1, node="big")
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"rewards": rewards})})
    asked: list[tuple[Any, ...]] = []

    class Session:
        def spawn(self, role: Role, factory: Any, args: Any, env: Any, *, stateless: bool) -> Local[RewardServer]:
            asked.append((role, factory, args, env, stateless))
            return Local(role.name, cast(Any, SimpleNamespace), ())

    found = spawn_rewards(config, cast(Any, Session()))
    wanted = [functions_of(config.rewards), 2, 5 * 2**30, Judging(config.run_dir / "judged", 1 / 2)]
    wanted += [config.run_dir / "reward_output.log"]
    env = CHILDREN_END_BY_THEMSELVES | {"GLEANER_REWARD_DEVICE": "cuda"}
    assert asked == [(Role(f"rewards-{i}", 3, 1, node="big"), RewardServer, wanted, env, True) for i in range(2)]
    budgets = Budgets(config.learner, 12345, 11, None, 0, ARRANGEMENTS["separate"], None, "")
    spec = worker_spec(config, 0, budgets, found)
    assert spec.reward_processes == RewardProcesses(tuple(found), config.group_deadline_s)
    assert config.reward_processes == 2 * 2
    assert [role.name for role in roles(config)] == ["generator-0", "rewards-0", "rewards-1", "learner"]


async def test_a_learner_that_is_lost_in_its_rehearsal_is_replaced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the config's whole micro-batch on the card for the first time: a likely moment to be killed."""
    told: list[tuple[BaseException, bool]] = []

    async def processes(*_: Any) -> Any:
        raise LearnerLost("learner: process died during rehearse")

    async def beside(work: Any) -> Any:
        return await work

    class Allowed:
        prepared = None

        def after(self, error: BaseException, *, begun: bool) -> bool:
            told.append((error, begun))
            return len(told) == 1

    monkeypatch.setattr(launch, "start_processes", processes)
    session, progress = SimpleNamespace(ray_processes=SimpleNamespace(beside=beside)), SimpleNamespace(note=print)
    arguments = cast(Any, (Allowed(), session, progress, Phases(0.0), asyncio.Event()))
    assert await launch._attempt(*arguments) is None
    assert [(type(error), begun) for error, begun in told] == [(LearnerLost, False)]
    with pytest.raises(LearnerLost):
        await launch._attempt(*arguments)


async def test_what_ends_a_run_beside_the_loop_is_known_to_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which saves its last step first: reward processes that are given up, and Ray's end."""
    given: list[str] = []

    async def beside(work: Any) -> Any:
        return await work

    async def processes(*_: Any) -> Any:
        return SimpleNamespace(generators=[], learner=None, rewards=["rewards-0", "rewards-1"], weights_stay=False)

    async def run(resume_from: Any, *work: Any) -> None:
        given.extend([await one for one in work])

    async def watch() -> str:
        return "Ray"

    async def kept(process: str, patience: Any) -> str:
        return process

    async def close(processes: Any) -> None:
        """There are none."""

    nothing = SimpleNamespace(close=lambda: None)
    sinks = SimpleNamespace(timeline=nothing, metrics=nothing)
    prepared = SimpleNamespace(config=config_of("m"), resume_from=None)
    monkeypatch.setattr(launch, "start_processes", processes)
    monkeypatch.setattr(launch, "_close", close)
    monkeypatch.setattr(launch, "kept_answering", kept)
    monkeypatch.setattr(launch, "_sinks", lambda *_: sinks)
    monkeypatch.setattr(launch, "_inputs", lambda *_: None)
    monkeypatch.setattr(launch, "wire", lambda *_: (SimpleNamespace(run=run, checkpoints=None), None))
    phases = SimpleNamespace(until_now=lambda *_: None, split=lambda *_: None)
    session = SimpleNamespace(ray_processes=SimpleNamespace(beside=beside, watch=watch))
    arguments: Any = (SimpleNamespace(prepared=prepared), session, SimpleNamespace(note=print), phases, asyncio.Event())
    await launch._attempt(*arguments)
    assert given == ["Ray", "rewards-0", "rewards-1"]


@pytest.mark.parametrize(("scored", "told"), [([0, 4], ""), ([0, 2], "; step 4 was not evaluated, which ")])
def test_a_finished_run_says_what_was_not_evaluated(tmp_path: Path, scored: list[int], told: str) -> None:
    (tmp_path / "state.json").write_text(
        json.dumps(
            {
                "cursor": {"low": 0, "done": []},
                "evaluations": [{"step": step, "metrics": {}, "samples": []} for step in scored],
            }
        )
    )
    prepared: Any = SimpleNamespace(config=config_of("m"), heldout=[1], resume_from=tmp_path, finished_steps=4)
    assert launch._unscored(prepared).startswith(told)
    assert bool(launch._unscored(prepared)) == bool(told)


async def test_the_learner_scores_at_the_samplers_temperature_and_divides_by_the_longest_completion(
    tiny_path: str, adapter_path: str, groups: list[pa.Table]
) -> None:
    """Of rows that were sampled at TEMPERATURE; either value wrong is another gradient."""
    trainer: Any = make_trainer(config_of(tiny_path, adapter_path), 10, None)
    found = await gradient(trainer, groups)
    model = naive.load(tiny_path, adapter_path)
    wanted = naive_gradient(model, None, groups, LossConfig.model_validate(LOSS), advantages_by_hand("none"))
    assert distance(found, wanted) < 2e-5
