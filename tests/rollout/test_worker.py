"""RolloutWorker without a model: the real tokenizer, the real reward processes, a fake engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch

from cluster.actor import Actor, Local, Unusable, ValueLost
from cluster.errors import WrongInput
from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tiny_model
from learner.tools.reward_trial import group_of
from rewards.call import Group
from rewards.config import RewardConfig
from rewards.pool import RewardPool, RewardService, Scores
from rollout.engine import EngineDied, EngineSettings, NoAdapter
from rollout.fakes import FakeEngine
from rollout.schema import Problem, parts_of, ragged
from rollout.scorer import RewardProcesses, SharedScorer
from rollout.teacher.process import Teacher
from rollout.types import Adapter, Completion, EngineError, Sampling, TeacherLogprobs, Weights
from rollout.weights import Source, WeightsFile
from rollout.worker import RolloutWorker, WorkerSpec

ADAPTER = Adapter.build(3, b"three", {})
SAMPLING = Sampling(n=4, max_tokens=12, seed=90)
# Two reward functions, each a function of one completion alone; the second raises on a marked problem.
REWARDS = """
def tail(completions, gold, **columns):
    return [float(sum(map(ord, text)) % 97) + g for text, g in zip(completions, gold)]

def count(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]

def state(completion_ids, trainer_state, **columns):
    seen = trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch
    return [100.0 * seen[0] + 10 * seen[1] + seen[2]] * len(completion_ids)
"""


def engine(settings: EngineSettings) -> FakeEngine:
    return FakeEngine(VOCAB_SIZE, stop_ids=settings.stop_ids, delay_s=0.01)


def problem(gold: Any = 0.25) -> Problem:
    return Problem("train-7", "2 + 2 =", {"gold": gold}, (50, 32, 43), 7, 1)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> WorkerSpec:
    folder: Path = tmp_path_factory.mktemp("worker")
    model = make_tiny_model(folder / "model")
    (folder / "mine.py").write_text(REWARDS)
    rewards = [RewardConfig(use=f"{folder}/mine.py:tail", weight=2.0), RewardConfig(use=f"{folder}/mine.py:count")]
    settings = EngineSettings(
        model=str(model), dtype="float32", max_model_len=64, kv_cache_bytes=1 << 20, max_num_seqs=8, max_lora_rank=8,
        adapter_window=2, seed=0,
    )  # fmt: skip
    return WorkerSpec(5, "run-a", settings, tuple(rewards), 1, 2**30, engine)


@pytest.fixture
async def worker(spec: WorkerSpec) -> AsyncIterator[RolloutWorker]:
    made = RolloutWorker(spec)
    yield made
    await made.close()


async def table_of(worker: RolloutWorker, asked: Problem, attempt: int = 2) -> Any:
    await worker.take_policy(ADAPTER)
    return await worker.rollout(asked, SAMPLING, attempt)


async def test_reward_functions_are_told_how_far_the_run_is(spec: WorkerSpec) -> None:
    use = spec.rewards[0].use.replace(":tail", ":state")
    worker = RolloutWorker(replace(spec, rewards=(RewardConfig(use=use),), steps=7))
    try:
        table = await table_of(worker, problem())
        assert set(table.column("reward").to_pylist()) == {100.0 * ADAPTER.version + 70 + 1}
    finally:
        await worker.close()


class Lengths:
    """A TeacherService whose logprob of a token is its place in its completion."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def completion_logprobs(self, prompt_ids: Sequence[int], completions: Sequence[Any]) -> list[TeacherLogprobs]:
        self.asked.append([*prompt_ids])
        none = np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32)
        return [TeacherLogprobs(np.arange(len(ids), dtype=np.float32), *none) for ids in completions]

    async def close(self) -> None:
        """There is nothing."""


async def test_the_teacher_is_asked_of_what_is_trained_on_and_of_no_evaluation(spec: WorkerSpec) -> None:
    teacher: Local[Any] = Local("teacher-0", Lengths, ())
    worker = RolloutWorker(replace(spec, teacher=Teacher(teacher, 0, 5.0)))
    try:
        table = await table_of(worker, problem())
        assert teacher._object.asked == [[50, 32, 43]]
        for told, ids in zip(ragged(table, "teacher_logprobs"), ragged(table, "completion_ids"), strict=True):
            assert told.tolist() == list(range(len(ids)))
        assert table.column("teacher_top_ids").null_count == SAMPLING.n
        assert table.column("reward_status").to_pylist() == ["ok"] * SAMPLING.n
        evaluated = await worker.rollouts([problem()], [SAMPLING], 0)
        assert evaluated is not None
        assert (evaluated.column("teacher_logprobs").null_count, len(teacher._object.asked)) == (SAMPLING.n, 1)
    finally:
        await worker.close()


async def test_rewards_stay_with_their_completions(worker: RolloutWorker) -> None:
    table = await table_of(worker, problem())
    texts, ids = table.column("completion").to_pylist(), ragged(table, "completion_ids")
    tails = [float(sum(map(ord, text)) % 97) + 0.25 for text in texts]
    counts = [float(len(tokens)) for tokens in ids]
    assert len(set(tails)) == SAMPLING.n  # else an exchange would not be seen
    assert texts == [worker.chat.decode(tokens.tolist()) for tokens in ids]
    assert table.column("reward").to_pylist() == [2 * a + b for a, b in zip(tails, counts, strict=True)]
    assert [list(parts.values()) for parts in parts_of(table)] == [list(row) for row in zip(tails, counts, strict=True)]
    assert [list(parts) for parts in parts_of(table)] == [["tail", "count"]] * SAMPLING.n
    assert table.column("reward_status").to_pylist() == ["ok"] * SAMPLING.n


async def test_every_fact_of_the_group_is_recorded(worker: RolloutWorker) -> None:
    before = time.time()
    table = await table_of(worker, problem())
    expected = await worker.engine.generate(problem().prompt_ids, SAMPLING)
    same = {
        "run_id": "run-a", "group_id": "1-7-2", "problem_id": "train-7", "epoch": 1, "position": 7, "attempt": 2,
        "worker": 5, "seed": 90, "prompt_ids": [50, 32, 43], "policy_version_min": 3, "policy_version_max": 3,
    }  # fmt: skip
    for name, value in same.items():
        assert table.column(name).to_pylist() == [value] * SAMPLING.n, name
    assert table.column("sample").to_pylist() == list(range(SAMPLING.n))
    assert table.column("finish_reason").to_pylist() == [c.finish_reason for c in expected]
    recorded: list[tuple[str, list[Any]]] = [
        ("completion_ids", [c.token_ids for c in expected]),
        ("behavior_logprobs", [c.logprobs for c in expected]),
        ("token_versions", [c.versions for c in expected]),
    ]
    for name, arrays in recorded:
        assert [row.tolist() for row in ragged(table, name)] == [array.tolist() for array in arrays], name
    assert json.loads(table.column("problem")[0].as_py()) == {"messages": "2 + 2 =", "columns": {"gold": 0.25}}
    assert 10 <= table.column("generate_ms")[0].as_py() < 10_000  # the fake engine takes 10 ms
    assert 0 < table.column("reward_ms")[0].as_py() < 10_000
    assert before <= table.column("created_at")[0].as_py() <= time.time()


async def test_the_tag_that_a_prompt_ends_in_is_recorded_and_the_reward_functions_know_it(spec: WorkerSpec) -> None:
    class Closing(FakeEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
            ids = np.array([*made.chat.tokenizer.encode("2</reasoning><answer>4</answer>"), EOS_IDS[0]], np.int32)
            return [Completion(ids, np.zeros(len(ids), np.float32), "stop", np.zeros(len(ids), np.int32))]

    rewards = (RewardConfig(use="format"),)
    made = RolloutWorker(replace(spec, rewards=rewards, make_engine=lambda _: Closing(VOCAB_SIZE)))
    found = []
    for text in ("2 + 2 = <reasoning>\n", "2 + 2 ="):
        ids = tuple(made.chat.tokenizer.encode(text))
        table = await table_of(made, replace(problem(), messages=text, prompt_ids=ids))
        again = group_of(table)
        found.append((table.column("reward").to_pylist(), again.prefilled))
    await made.close()
    assert found == [([1.0], "<reasoning>\n"), ([0.0], "")]


async def test_what_a_teacher_is_given_is_recorded_and_not_generated_from(worker: RolloutWorker) -> None:
    table = await table_of(worker, replace(problem(), teacher_ids=(7, 8)))
    assert table.column("teacher_prompt_ids").to_pylist() == [[7, 8]] * SAMPLING.n
    plain = await table_of(worker, problem())
    assert plain.column("teacher_prompt_ids").null_count == SAMPLING.n
    assert table.column("completion_ids").equals(plain.column("completion_ids"))


async def test_several_problems_at_once_give_the_rows_that_each_gives_alone(spec: WorkerSpec) -> None:
    made: list[Crowded] = []

    def crowded(settings: EngineSettings) -> Crowded:
        made.append(Crowded(settings))
        return made[-1]

    worker = RolloutWorker(replace(spec, make_engine=crowded))
    await worker.take_policy(ADAPTER)
    problems = [replace(problem(gold), id=f"train-{i}", position=i) for i, gold in enumerate([0.25, 0.5, 4.0] * 3)]
    samplings = [replace(SAMPLING, n=2, seed=100 * i) for i in range(9)]
    every, beside = await asyncio.gather(
        worker.rollouts(problems, samplings, 1), worker.rollout(problem(), SAMPLING, 0)
    )
    assert every is not None
    assert beside is not None
    alone = pa.concat_tables([await worker.rollout(p, s, 1) for p, s in zip(problems, samplings, strict=True)])
    await worker.close()
    timed = ["generate_ms", "reward_ms", "created_at"]
    assert every.drop_columns(timed).equals(alone.drop_columns(timed).combine_chunks())
    assert made[0].most == spec.engine.max_num_seqs + SAMPLING.n  # the group beside them waited for none of them
    assert beside.num_rows == SAMPLING.n


class Crowded(FakeEngine):
    """Counts the completions that run at once."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(VOCAB_SIZE, stop_ids=settings.stop_ids, delay_s=0.01)
        self.running = self.most = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
        self.running += sampling.n
        self.most = max(self.most, self.running)
        try:
            return await super().generate(prompt_ids, sampling)
        finally:
            self.running -= sampling.n


async def test_end_tokens_of_the_model_and_of_stop_reach_the_engine(spec: WorkerSpec) -> None:
    wanted: list[EngineSettings] = []

    def note(settings: EngineSettings) -> FakeEngine:
        wanted.append(settings)
        return engine(settings)

    stop = ("<|im_start|>", "</answer>")
    await RolloutWorker(replace(spec, make_engine=note, engine=replace(spec.engine, stop=stop))).close()
    assert [(settings.stop_ids, settings.stop) for settings in wanted] == [((*EOS_IDS, 257), ("</answer>",))]


async def test_the_settings_of_the_reward_processes_reach_the_pool(
    spec: WorkerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[tuple[Any, ...]] = []

    class Noted(RewardPool):
        def __init__(self, *given: Any) -> None:
            pools.append(given)
            super().__init__(*given)

    monkeypatch.setattr("rollout.worker.RewardPool", Noted)
    printed = tmp_path / "reward_output.log"
    await RolloutWorker(replace(spec, reward_workers=2, reward_memory=3 * 2**30, printed=printed)).close()
    assert pools == [(spec.rewards, 2, 3 * 2**30, spec.judged, printed)]


async def test_a_failed_reward_function_is_said_once_and_gives_no_reward(
    worker: RolloutWorker, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        table = await table_of(worker, problem("no number"))
        assert table.column("reward").to_pylist() == [None] * SAMPLING.n
        assert table.column("reward_status").to_pylist() == ["error"] * SAMPLING.n
        (error,) = {*table.column("reward_error").to_pylist()}
        assert error.startswith("reward 'tail'")
        assert "error: TypeError: " in error
        assert [parts["count"] for parts in parts_of(table)] == [float(len(i)) for i in ragged(table, "completion_ids")]
    assert ["TypeError" in record.getMessage() for record in caplog.records if "tail" in record.getMessage()] == [True]


async def test_only_so_many_different_failures_are_said(
    worker: RolloutWorker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.scorer.MOST", 2)
    for gold in ("no number", None, [0.25]):  # each a TypeError of its own
        await table_of(worker, problem(gold))
    assert sum("TypeError" in record.getMessage() for record in caplog.records) == 2


async def test_a_seed_that_is_left_to_chance_is_recorded_as_such(worker: RolloutWorker) -> None:
    await worker.take_policy(ADAPTER)
    table = await worker.rollout(problem(), replace(SAMPLING, seed=None), 0)
    assert table is not None
    assert table.column("seed").to_pylist() == [-1] * SAMPLING.n


async def test_without_a_policy_there_is_neither_group_nor_probe(worker: RolloutWorker) -> None:
    assert await worker.rollout(problem(), SAMPLING, 0) is None
    with pytest.raises(NoAdapter):
        await worker.probe([1, 2, 3])


async def test_weights_are_read_where_the_learner_has_them_unless_it_has_newer_ones(worker: RolloutWorker) -> None:
    file, sources = WeightsFile(), {"weight": Source.of(torch.ones(3))}
    empty = file.pack(0, {}, torch.float32)
    assert await worker.reaches(empty) == ""
    assert "must run in one container" in await worker.reaches(empty._replace(machine="another"))
    assert "gone with the learner" in await worker.reaches(empty._replace(inode=1))
    old, _, new = (file.pack(version, sources, torch.float32) for version in (4, 5, 6))
    assert await worker.take_policy(old) is None
    receipt = await worker.take_policy(new)
    assert receipt is not None
    assert receipt.digest == new.digest
    table = await worker.rollout(problem(), SAMPLING, 0)
    assert table is not None
    assert set(table.column("policy_version_max").to_pylist()) == {6}
    file.close()
    with pytest.raises(ValueLost):
        await worker.take_policy(new)


async def test_policies_probe_and_sleep_reach_the_engine(worker: RolloutWorker) -> None:
    for policy in (ADAPTER, Weights.build(4, b"four")):
        receipt = await worker.take_policy(policy)
        assert receipt is not None
        assert receipt.digest == policy.digest
        assert 0 <= receipt.load_s < 10
        assert receipt.peak_memory > 2**20
    answer = await worker.probe([1, 2, 3])
    assert answer is not None
    assert answer.logprobs.tolist() == (await worker.engine.probe([1, 2, 3])).tolist()
    assert answer.held == await worker.engine.held()
    assert 0 < answer.seconds < 10
    await worker.sleep()
    with pytest.raises(EngineError):
        await worker.engine.probe([1, 2])
    await worker.wake()
    await worker.engine.probe([1, 2])


class Dying(FakeEngine):
    """Every call finds it dead."""

    async def _die(self, *args: Any) -> Any:
        raise EngineDied("out of\n  memory")

    generate = load_adapter = load_weights = probe = sleep = wake = _die  # type: ignore[assignment]


async def test_the_death_of_the_engine_is_that_of_the_process_in_its_own_words(spec: WorkerSpec) -> None:
    worker = RolloutWorker(replace(spec, make_engine=lambda settings: Dying(VOCAB_SIZE)))
    for call in (
        lambda: worker.rollout(problem(), SAMPLING, 0),
        lambda: worker.take_policy(ADAPTER),
        lambda: worker.take_policy(Weights.build(4, b"four")),
        lambda: worker.probe([1, 2]),
        worker.sleep,
        worker.wake,
    ):
        with pytest.raises(Unusable, match="^out of memory$"):
            await call()
    await worker.close()


async def test_close_ends_engine_and_reward_processes(spec: WorkerSpec) -> None:
    before = set(psutil.Process().children(recursive=True))
    worker = RolloutWorker(spec)
    await table_of(worker, problem())
    own = set(psutil.Process().children(recursive=True)) - before
    assert own
    await worker.close()
    assert [process for process in own if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
    with pytest.raises(EngineError):
        await worker.engine.probe([1, 2])


# Which reward process is asked, and what comes back from it.

GROUP = Group(["2 + 2 ="] * 2, ["4", "5"], [[1], [2]], {"gold": [4, 4]})


class Held:
    """Scores a group when it is let go on; knows what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Group] = []
        self.free = asyncio.Event()

    async def score(self, group: Group) -> Scores | str:
        self.asked.append(group)
        await self.free.wait()
        if group.completions == ["bad"]:
            return "reward 'a': error: it must not fail"
        return Scores([1.0, 0.0], {"a": [1.0, 0.0]}, ["ok", "ok"], -1.0, (), [None, None])


def shared(*held: Held) -> RewardProcesses:
    actors = [Local(f"rewards-{i}", lambda one=one: one, ()) for i, one in enumerate(held)]
    return RewardProcesses(tuple(cast(Actor[RewardService], one) for one in actors), 5.0)


async def test_each_group_goes_to_the_process_with_the_least_to_do_and_comes_back_whole() -> None:
    held = Held(), Held(), Held()
    scorer = SharedScorer(shared(*held), first=4)  # of the generator number 4: it begins with the second
    asked = [asyncio.create_task(scorer.score(GROUP)) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert [len(one.asked) for one in held] == [1, 2, 2]
    assert held[1].asked[0] == GROUP
    held[1].free.set()
    first = await asked[0]
    assert (first.reward, first.parts, first.status) == ([1.0, 0.0], {"a": [1.0, 0.0]}, ["ok", "ok"])
    await asyncio.sleep(0.05)
    last = [asyncio.create_task(scorer.score(GROUP)) for _ in range(3)]  # the second has nothing to do, the first one
    await asyncio.sleep(0.05)
    assert [len(one.asked) for one in held] == [1, 5, 2]
    for one in held:
        one.free.set()
    await asyncio.gather(*asked, *last)


async def test_a_function_that_must_not_fail_fails_here_as_it_would_beside_the_engine() -> None:
    held = Held()
    held.free.set()
    scorer = SharedScorer(shared(held), first=0)
    with pytest.raises(WrongInput, match="^reward 'a': error: it must not fail$"):
        await scorer.score(Group(["p"], ["bad"], [[1]], {}))
    scorer.close()


async def test_the_time_of_a_score_is_that_of_the_way_there_and_back() -> None:
    held = Held()

    async def answers() -> None:
        while not held.asked:
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        held.free.set()

    scores, _ = await asyncio.gather(SharedScorer(shared(held), first=0).score(GROUP), answers())
    assert 49 <= scores.ms < 5000
