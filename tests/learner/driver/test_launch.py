"""Composition: what the configuration says reaches sampler, engine and learner, each value where it belongs. The
watch over reward processes of their own, without Ray: what it does when, and how long it waits. Whole weights that
stay in the learner's memory, which has room for two: the real loop, between fakes. How long a group may take that
waits behind others, and who waits as long as that.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from benchmarks.system.local_run import VOCAB, local_run
from cluster.actor import ActorDied, DeadlineExceeded, Local, Unusable
from cluster.buffer import MAX_REFILLS, Batch, Buffer
from cluster.config import Deadlines, RewardProcessConfig
from cluster.memory.teacher import TeacherBudget
from cluster.placement import Role
from cluster.telemetry import Timeline
from learner.algo.surrogates import LossConfig
from learner.config import RunConfig, roles
from learner.config.arrangement import ARRANGEMENTS
from learner.driver import launch
from learner.driver.console import Phases
from learner.driver.failure import LearnerLost, RunEnded
from learner.driver.launch import Patience, kept_answering, sampling_of
from learner.driver.loop import Batches
from learner.driver.machine_checks import needs
from learner.driver.memory import Budgets
from learner.driver.process import ENDS
from learner.driver.roles import (
    CHILDREN_END_BY_THEMSELVES,
    Serves,
    make_trainer,
    spawn_rewards,
    spawn_teacher,
    weights_stay,
    worker_spec,
)
from rewards.config import functions_of
from rewards.pool import Judging, RewardServer
from rollout.delivery import Receipt
from rollout.fakes import FakeEngine, FakeWorker
from rollout.scorer import RewardProcesses
from rollout.service import RolloutService
from rollout.teacher.process import Teacher, TeacherServer
from rollout.types import Completion, Sampling, SentPolicy, WeightsInFile, group_seed
from rollout.vllm.environment import required_env
from tests.learner import naive
from tests.learner.loops import PER_STEP, Trainer, Worker, build, configure, consumed, finish, waiting
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
    spec = worker_spec(config, 0, budgets, Serves(found))
    assert spec.reward_processes == RewardProcesses(tuple(found), config.group_deadline_s)
    assert config.reward_processes == 2 * 2
    assert [role.name for role in roles(config)] == ["generator-0", "rewards-0", "rewards-1", "learner"]


def test_a_teacher_gets_its_model_and_the_generators_get_the_teacher() -> None:
    tree = config_of("m").model_dump(exclude_unset=True)
    tree["model"]["teacher"], tree["rollout"]["temperature"] = "t", 1.0
    tree["learner"]["loss"] = LOSS | {"beta": 0.5, "teacher_top": 4}
    tree["cluster"] = {"cpus": {"teacher": 3}}
    config = RunConfig.model_validate(tree)
    budget = TeacherBudget(longest=99, step=777, kv_bytes=55, vocabulary=64, others=8, parts=None, cuda=False)
    budgets = Budgets(config.learner, 12345, 11, None, 0, ARRANGEMENTS["separate"], None, "", budget)
    asked: list[tuple[Any, ...]] = []

    class Session:
        def spawn(self, role: Role, factory: Any, args: Any, env: Any, *, stateless: bool) -> str:
            asked.append((role, factory, *args, env, stateless))
            return role.name

    found = spawn_teacher(config, budgets, cast(Any, Session()))
    (role, factory, spec, env, stateless), *others = asked
    assert (cast(Any, found), others) == (["teacher-0"], [])
    assert (role, factory) == (Role("teacher-0", 3, 0), TeacherServer)
    assert (env, stateless) == (required_env(cuda=False), True)  # Ray replaces it, and repeats the calls that it had
    assert (spec.top, spec.vocabulary, spec.silence_s) == (4, 64, config.cluster.deadlines.silence)
    engine = spec.engine
    assert (engine.model, engine.dtype, engine.max_model_len, engine.kv_cache_bytes) == ("t", "float32", 99, 55)
    assert (engine.prompt_logprobs, engine.step_tokens, engine.max_lora_rank, engine.shards) == (12, 777, 0, 1)
    teacher = worker_spec(config, 0, budgets, Serves(teacher=cast(Any, "teacher-0"))).teacher
    assert teacher == Teacher(cast(Any, "teacher-0"), 4, config.group_deadline_s)
    assert [one.name for one in roles(config)] == ["generator-0", "teacher-0", "learner"]
    assert [need.kind for need in needs(config)] == ["generator", "learner", "teacher"]
    assert needs(config)[-1].models == {"model.teacher": "t"}
    assert spawn_teacher(config, replace(budgets, teacher=None), cast(Any, Session())) == []


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
        return SimpleNamespace(generators=[], learner=None, serving=["rewards-0", "teacher-0"], weights_stay=False)

    async def run(resume_from: Any, *work: Any) -> None:
        given.extend([await one for one in work])

    async def watch() -> str:
        return "Ray"

    async def kept(process: str, patience: Any) -> str:
        return process

    async def close(generators: Any, serving: Any) -> None:
        """There are none."""

    nothing = SimpleNamespace(close=lambda: None)
    sinks = SimpleNamespace(timeline=nothing, metrics=nothing)
    prepared = SimpleNamespace(config=config_of("m"), resume_from=None)
    monkeypatch.setattr(launch, "start_processes", processes)
    monkeypatch.setattr(launch, "close_all", close)
    monkeypatch.setattr(launch, "kept_answering", kept)
    monkeypatch.setattr(launch, "sinks_of", lambda *_: sinks)
    monkeypatch.setattr(launch, "inputs_of", lambda *_: None)
    monkeypatch.setattr(launch, "wire", lambda *_: (SimpleNamespace(run=run, checkpoints=None), None))
    phases = SimpleNamespace(until_now=lambda *_: None, split=lambda *_: None)
    session = SimpleNamespace(ray_processes=SimpleNamespace(beside=beside, watch=watch))
    arguments: Any = (SimpleNamespace(prepared=prepared), session, SimpleNamespace(note=print), phases, asyncio.Event())
    await launch._attempt(*arguments)
    assert given == ["Ray", "rewards-0", "teacher-0"]


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


# The watch over reward processes of their own, without Ray: what it does when, and how long it waits.

PATIENCE = Patience(silence_s=4.0, start_s=7.0)


class Process:
    """A Remote[RewardServer] that is lost as it is told, again and again."""

    name = "rewards-0"

    def __init__(self, *answers: Exception, starts: Exception | None = None) -> None:
        self.answers, self.starts = [*answers], starts
        self.calls: list[tuple[str, float]] = []

    async def until_ended(self, silence_s: float) -> None:
        self.calls.append(("until_ended", silence_s))
        if not self.answers:
            raise asyncio.CancelledError  # the end of the test
        raise self.answers.pop(0)

    async def restart(self) -> None:
        self.calls.append(("restart", 0.0))

    async def ready(self, deadline_s: float) -> None:
        self.calls.append(("ready", deadline_s))
        if self.starts is not None:
            raise self.starts


async def watched(process: Process) -> list[str]:
    with pytest.raises(asyncio.CancelledError):
        await kept_answering(cast(Any, process), PATIENCE)
    return [name for name, _ in process.calls]


async def test_one_that_hangs_is_ended_and_one_that_ended_is_not() -> None:
    hung = Process(DeadlineExceeded("rewards-0: pulse gave no answer"))
    assert await watched(hung) == ["until_ended", "restart", "ready", "until_ended"]
    assert dict(hung.calls) == {"until_ended": 4.0, "restart": 0.0, "ready": 7.0}
    assert await watched(Process(ActorDied("rewards-0: died"))) == ["until_ended", "ready", "until_ended"]


async def test_where_no_fresh_process_starts_the_run_ends_with_its_name() -> None:
    process = Process(ActorDied("rewards-0: died"), starts=DeadlineExceeded("rewards-0: start gave no answer"))
    with pytest.raises(RunEnded, match="^rewards-0: it was lost, and no fresh process has started within 7 s"):
        await kept_answering(cast(Any, process), PATIENCE)


async def test_one_that_is_lost_again_and_again_ends_the_run() -> None:
    process = Process(*[ActorDied("rewards-0: died of a group")] * 7)
    with pytest.raises(RunEnded, match="^rewards-0: died of a group; it was lost 6 times in a row"):
        await kept_answering(cast(Any, process), PATIENCE)
    slow = Patience(silence_s=0.0, start_s=7.0)  # so long after the one before, a loss is the first again
    with pytest.raises(asyncio.CancelledError):
        await kept_answering(cast(Any, Process(*[ActorDied("rewards-0: died")] * 7)), slow)


@pytest.mark.parametrize(
    ("group", "heartbeat", "start", "wanted"),
    [(900, 300, 600, (150, 450)), (900, 300, 100, (150, 100)), (120, 300, 600, (30, 60))],
)
def test_generators_that_wait_for_it_are_not_taken_for_hung(
    group: float, heartbeat: float, start: float, wanted: tuple[float, float]
) -> None:
    found = Patience.of(Deadlines(group=group, heartbeat=heartbeat, start=start))
    assert (found.silence_s, found.start_s) == wanted
    assert found.silence_s + found.start_s < group


# Whole weights that stay in the learner's memory, which has room for two: the real loop, between fakes.

RANKS = {"cluster": {"learners": 2}}
SHARDS = RANKS | {"memory": {"layout": "sharded"}}
MERGED = {"push": "merged", "groups_per_step": PER_STEP}
WHOLE = {"mode": "full", "learning_rate": 1e-5, "groups_per_step": PER_STEP}


class Memory:
    """What the learner has written, and the policies that were gone when a generator came for them."""

    def __init__(self) -> None:
        self.asked, self.newest, self.late = list[bool](), -1, list[int]()

    def trainer(self) -> Local[Any]:
        memory = self

        class Staying(Trainer):
            async def outgoing(self, stays: bool = False) -> Any:
                memory.asked.append(stays)
                memory.newest = self.version
                return await super().outgoing(stays)

        return Local("learner", Staying, [0.0, 0.0])

    def worker(self, rank: int, *, slow_s: float = 0.0, dies_at_wake: int = 0) -> Local[Any]:
        memory, wakes = self, itertools.count(1)

        class Reading(Worker):
            async def take_policy(self, policy: SentPolicy) -> Receipt | None:
                await asyncio.sleep(slow_s)
                if policy.version < memory.newest - 1:
                    memory.late.append(policy.version)
                    return None
                return await super().take_policy(policy)

            async def wake(self) -> None:
                if next(wakes) == dies_at_wake:
                    raise Unusable("killed while it slept")
                await super().wake()

        return Local(f"generator-{rank}", Reading, [0.0, None])


async def test_no_generator_that_is_waited_for_comes_too_late(tmp_path: Path) -> None:
    memory = Memory()
    workers = [memory.worker(rank, slow_s=0.01 * rank) for rank in range(2)]
    config = configure(max_staleness=2, learner=MERGED)
    await local_run(tmp_path, config, 6, generators=workers, trainer=memory.trainer(), weights_stay=True).finish()
    assert (memory.asked, memory.late) == ([True] * 7, [])


async def test_one_that_is_lost_in_the_learners_turn_is_brought_what_was_published(tmp_path: Path) -> None:
    """The learner has written the next policy by then, and waits for the generators before it is published."""
    memory = Memory()
    worker = memory.worker(0, dies_at_wake=3)
    config = configure(learner=MERGED)
    loop = local_run(
        tmp_path,
        config,
        5,
        generators=[worker],
        trainer=memory.trainer(),
        arrangement=ARRANGEMENTS["alternating"],
        weights_stay=True,
    )
    await worker.call(RolloutService.sleep, 1)
    async with asyncio.timeout(20):
        await loop.finish()
    assert memory.asked == [True] * 6
    assert consumed(tmp_path) == [list(range(3 * step, 3 * step + 3)) for step in range(5)]


class Placed:
    """A session that has put each role on the node of that number."""

    def __init__(self, **nodes: int) -> None:
        self._nodes = {name.replace("_", "-"): node for name, node in nodes.items()}

    def node_of(self) -> dict[str, int]:
        return self._nodes


class Trying(Worker):
    """answer: what comes of its try."""

    def __init__(self, answer: str | Exception) -> None:
        super().__init__(0.0, None)
        self.answer = answer

    async def reaches(self, place: WeightsInFile) -> str:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


ALONE = Placed(generator_0=0, generator_1=0, learner=0)


@pytest.mark.parametrize(
    ("learner", "others", "placed", "answers", "stay", "said"),
    [
        (MERGED, {}, ALONE, ["", ""], True, ""),
        ({"groups_per_step": PER_STEP}, {}, ALONE, ["", ""], False, ""),  # an adapter
        (MERGED, {}, Placed(generator_0=0, generator_1=1, learner=0), ["", ""], False, ""),
        (MERGED, {}, ALONE, ["", "a sandbox"], False, "whole weights go through Ray's object store, .*: a sandbox"),
        (MERGED, {}, ALONE, ["", Unusable("killed")], False, ""),
        # Of several ranks one may be lost with the policy that it has sent, unless all are lost with it.
        (MERGED, RANKS, Placed(generator_0=0, generator_1=0, learner_0=0, learner_1=0), ["", ""], False, ""),
        (WHOLE, SHARDS, Placed(generator_0=0, generator_1=0, learner_0=0, learner_1=0), ["", ""], True, ""),
    ],
)
async def test_weights_stay_where_every_generator_can_read_them(
    learner: dict[str, Any],
    others: dict[str, Any],
    placed: Any,
    answers: list[Any],
    stay: bool,
    said: str,
) -> None:
    notes = list[str]()
    config = configure(learner=learner, rollout={"workers": 2}, **others)
    generators = [Local(f"generator-{rank}", Trying, [answer]) for rank, answer in enumerate(answers)]
    assert await weights_stay(config, placed, Memory().trainer(), generators, notes.append) == stay
    assert len(notes) == bool(said)
    assert re.match(said, "".join(notes))


# How long a group may take that waits behind others, and who waits as long as that.

GROUP_S = 0.02


class Queued(FakeEngine):
    """An engine with room for one group: the others wait in its queue."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self._room = asyncio.Semaphore(1)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        async with self._room:
            await asyncio.sleep(GROUP_S)
            return await super().generate(prompt_ids, sampling)


class SlowWorker(FakeWorker):
    def __init__(self) -> None:
        super().__init__(Queued())


async def test_groups_that_wait_for_room_in_the_engine_are_not_taken_for_hung(tmp_path: Path) -> None:
    """32 are asked for at once, of which the last is there after three times the deadline of one."""
    config = configure(
        max_staleness=3, data={"path": "fake", "eval": {"every": 0}}, learner={"groups_per_step": 8},
        rollout={"max_num_seqs": 2},
    )  # fmt: skip
    config = waiting(config, group=10 * GROUP_S)
    run = build(tmp_path, config, 4, workers=[Local("generator-0", SlowWorker, [])])
    await finish(run)
    assert [producer.worker.restarts for producer in run.loop.producers] == [0]


@pytest.mark.parametrize(
    ("changed", "rounds"),
    [
        ({}, 1),  # 6 completions of 128
        ({"rollout": {"max_num_seqs": 5}}, 2),
        ({"rollout": {"max_num_seqs": 4, "workers": 2}}, 1),  # two of the three groups
        ({"rollout": {"max_num_seqs": 3, "workers": 2}, "max_staleness": 2}, 4),  # five of nine
        ({"rollout": {"max_num_seqs": 1}, "env": {"use": "number_guessing"}}, 3),  # two are played meanwhile
        ({"rollout": {"max_num_seqs": 2}, "env": {"use": "number_guessing", "concurrency": 1}}, 6),
    ],
)
def test_the_deadline_counts_once_for_each_round(changed: dict[str, object], rounds: int) -> None:
    assert configure(**changed).group_deadline_s == 900.0 * rounds


def group_deadline_config_of(**changed: object) -> RunConfig:
    return waiting(configure(**changed), start=0.05, group=0.02)


@pytest.mark.parametrize(
    ("rollout", "groups"),
    [({}, 1), ({"max_num_seqs": 2}, 3), ({"dynamic_sampling": True}, 1 + MAX_REFILLS)],
)
async def test_a_batch_is_waited_for_as_long_as_its_groups_may_take(
    tmp_path: Path, rollout: dict[str, object], groups: int
) -> None:
    waited = 0.05 + groups * 0.02
    timeline = Timeline(tmp_path / "timeline.json")
    with pytest.raises(TimeoutError, match=f"waited {waited:g} s for 3 groups"):
        await Batches(group_deadline_config_of(rollout=rollout), Buffer(3, 0, 2**20, print), timeline).take(0)
    timeline.close()


async def test_a_batch_holds_nothing_older_than_max_staleness(tmp_path: Path) -> None:
    asked: list[int] = []

    class Noting(Buffer):
        async def take(self, count: int, oldest_version: int, useful: object = None) -> Batch:
            asked.append(oldest_version)
            return Batch([], [pa.table({})])

    timeline = Timeline(tmp_path / "timeline.json")
    await Batches(group_deadline_config_of(max_staleness=2), Noting(3, 2, 2**20, print), timeline).take(7)
    assert asked == [5]
    timeline.close()
