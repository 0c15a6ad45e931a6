"""The held-out score where a reward function fails, or gives no score. Held-out problems in calls of several: by
hand, against one problem a call, and with generators that are lost.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from cluster.actor import Local, Unusable
from cluster.config import Deadlines
from learner.config import RunConfig
from learner.driver import evaluate as held_out_calls
from learner.driver.evaluate import Calls, Evaluation, accuracy_reward, calls_of, evaluate, generate
from learner.tools.evaluation import EvaluatedWorker
from rewards.config import RewardConfig
from rollout.fakes import FakeEngine, FakeWorker, make_group, make_problem
from rollout.schema import Problem, groups_of
from rollout.types import Sampling, Weights
from tests.learner.loops import configure

CONFIG = configure(rewards=[{"use": "vowels"}, {"use": "other", "weight": 0.1}])


class Generator:
    """A Producer whose completions were scored so: (number of `vowels`, status)."""

    def __init__(self, said: list[tuple[float | None, str]]) -> None:
        self.said = said

    async def requests(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int, lost: object
    ) -> pa.Table:
        assert [sampling.temperature for sampling in samplings] == [0] * len(problems)
        return pa.concat_tables(map(self.group, problems))

    away = False

    async def present(self) -> None:
        """It always is."""

    def group(self, problem: Problem) -> pa.Table:
        value, status = self.said[problem.position]
        reward = None if value is None or math.isnan(value) else value
        parts = [[("vowels", value), ("other", 5.0)]]
        return make_group(problem.position, rewards=[reward], reward_parts=parts, reward_status=[status])


async def score(*said: tuple[float | None, str]) -> dict[str, float]:
    generator: Any = Generator(list(said))
    problems = [make_problem(position) for position in range(len(said))]
    return (await evaluate([generator], problems, CONFIG, step=0)).metrics


async def test_a_failure_counts_as_wrong_and_unscored_not_at_all() -> None:
    found = await score((1.0, "ok"), (None, "ok"), (math.nan, "timeout"), (0.5, "error"), (None, "none"))
    assert found["eval/accuracy"] == pytest.approx((1.0 + 0.0 + 0.5) / 3)
    assert found["eval/unscored"] == 2
    assert found["eval/failed"] == pytest.approx(2 / 5)
    assert found["eval/vowels"] == 0.75


def test_what_counts_as_accuracy() -> None:
    rewards = [RewardConfig(use="format", weight=2.0), RewardConfig(use="mine.py:accuracy", weight=0.5)]
    assert accuracy_reward(rewards, None) == accuracy_reward(rewards, "accuracy") == "accuracy"
    assert accuracy_reward(rewards[:1], None) == accuracy_reward(rewards[:1], "format") == "format"
    with pytest.raises(ValueError, match="data.eval.reward: must be accuracy where .*, got format; give the function"):
        accuracy_reward(rewards, "format")


def test_a_watch_counts_as_accuracy_where_nothing_else_can_or_it_is_named() -> None:
    small, large = RewardConfig(use="format", weight=0.5), RewardConfig(use="math", watch=True)
    named, model = RewardConfig(use="mine.py:accuracy", watch=True), RewardConfig(use="adapter:a/b")
    assert accuracy_reward([small, large], None) == "format"
    assert accuracy_reward([small, large], "math") == "math"
    assert accuracy_reward([small, named], None) == "accuracy"  # eval/accuracy is its mean
    assert accuracy_reward([model, large], None) == "math"
    assert accuracy_reward([large], None, environment=True) is None  # the environment's own sum
    assert accuracy_reward([small, large], None, environment=True) == "format"


async def test_without_any_score_there_is_no_accuracy_and_where_all_have_one_no_count() -> None:
    found = await score((None, "ok"), (None, "none"))
    assert "eval/accuracy" not in found
    assert found["eval/unscored"] == 2
    assert "eval/unscored" not in await score((1.0, "ok"))


# Held-out problems in calls of several: by hand, against one problem a call, and with generators that are lost.

PROBLEMS = [make_problem(position, (1, 5, position % 8)) for position in range(40)]


@pytest.mark.parametrize(
    ("problems", "generators", "running", "calls"),
    [
        (200, 1, 128, Calls(size=16, at_once=16, rounds=2)),
        (100, 1, 128, Calls(size=16, at_once=16, rounds=1)),  # all run at once: none waits for another
        (200, 8, 128, Calls(size=6, at_once=42, rounds=2)),  # 34 calls, four or five for each generator
        (1000, 1, 5, Calls(size=5, at_once=2, rounds=2)),  # environments: never more in a call than are played
        (3, 2, 128, Calls(size=1, at_once=256, rounds=1)),
        (7, 1, 1, Calls(size=1, at_once=2, rounds=2)),
    ],
)
def test_how_problems_are_asked_for(problems: int, generators: int, running: int, calls: Calls) -> None:
    assert calls_of(problems, generators, running) == calls
    assert calls.size * calls.at_once <= calls.rounds * running or calls.rounds * running >= problems


def generator(rank: int, worker: type[FakeWorker] = FakeWorker) -> EvaluatedWorker:
    actor = Local(f"generator-{rank}", worker, [FakeEngine(8, stop_ids=(0, 2, 4), delay_s=1e-3), rank])
    return EvaluatedWorker(actor, Weights.unchanged(0), Deadlines())


async def begun(*generators: EvaluatedWorker) -> list[EvaluatedWorker]:
    await asyncio.gather(*(one.begin() for one in generators))
    return [*generators]


async def evaluated(generators: int, config: RunConfig) -> Evaluation:
    return await evaluate(await begun(*map(generator, range(generators))), PROBLEMS, config, 0)


async def test_the_evaluation_is_that_of_one_problem_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(rollout={"max_num_seqs": 12})
    several = await evaluated(3, config)
    monkeypatch.setattr(held_out_calls, "LARGEST", 1)
    assert several == await evaluated(1, config)
    assert 0 < several.metrics["eval/accuracy"] < 1


class Counting(FakeWorker):
    """Notes what is asked; the process of the first generator ends amid its second call, and the fresh one at once."""

    asked: Counter[int]
    lost: set[int]
    calls = 0

    async def rollouts(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int
    ) -> pa.Table | None:
        groups = await super().rollouts(problems, samplings, attempt)
        positions = [problem.position for problem in problems]
        type(self).asked.update(positions)
        if self._rank == 0:
            type(self).calls += 1
            if type(self).calls in (2, 4):
                type(self).lost |= set(positions)
                raise Unusable(f"lost for the {type(self).calls}th time")
        return groups


async def test_what_a_lost_generator_had_is_asked_again_and_nothing_is_missing_or_double() -> None:
    Counting.asked, Counting.lost = Counter(), set()
    workers = await begun(generator(0, Counting), generator(1, Counting))
    told: list[int] = []
    config = configure(rollout={"max_num_seqs": 4})
    tables = await generate(
        workers, PROBLEMS, config, lambda i: Sampling(n=2, max_tokens=4, seed=10 * i), attempt=1, done=told.append
    )
    groups = [group for table in tables for group in groups_of(table)]
    assert [group.column("position")[0].as_py() for group in groups] == [*range(40)]
    assert [group.column("seed").to_pylist() for group in groups] == [[10 * i] * 2 for i in range(40)]
    assert {group.column("worker")[0].as_py() for group in groups} == {0, 1}
    assert Counting.lost
    assert all(count == 1 for position, count in Counting.asked.items() if position not in Counting.lost)
    assert all(Counting.asked[position] > 1 for position in Counting.lost)
    assert sum(told) == 40


async def test_a_generator_that_is_free_takes_what_a_slow_one_would_have_had() -> None:
    """The slow one answers once the other has had all but what both were asked for at once: two calls of four."""
    rest, taken = asyncio.Event(), 0

    class Slow(FakeWorker):
        async def rollouts(
            self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int
        ) -> pa.Table | None:
            await rest.wait()
            return await super().rollouts(problems, samplings, attempt)

    class Free(FakeWorker):
        async def rollouts(
            self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int
        ) -> pa.Table | None:
            nonlocal taken
            taken += len(problems)
            if taken == len(PROBLEMS) - 2 * 4:
                rest.set()
            return await super().rollouts(problems, samplings, attempt)

    workers = await begun(generator(0, Slow), generator(1, Free))
    config = configure(rollout={"max_num_seqs": 4})
    async with asyncio.timeout(10):
        tables = await generate(workers, PROBLEMS, config, lambda _: Sampling(n=1, max_tokens=4))
    assert Counter(rank for table in tables for rank in table.column("worker").to_pylist()) == {0: 8, 1: 32}


async def test_calls_of_a_generator_that_is_gone_do_not_wait_for_it_where_it_asked_for_more_first() -> None:
    """Of 16 lanes 8 have a call; the lost generator's others wait for the next, and are the first to be given it."""
    busy = asyncio.Event()

    class Dies(FakeWorker):
        async def rollouts(
            self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int
        ) -> pa.Table | None:
            await busy.wait()
            raise Unusable("its node is gone")

    class Busy(FakeWorker):
        async def rollouts(
            self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int
        ) -> pa.Table | None:
            await asyncio.sleep(0.02)  # all lanes have asked by then
            busy.set()
            await asyncio.sleep(0.02)
            return await super().rollouts(problems, samplings, attempt)

    class NoRoom(Local[FakeWorker]):
        async def revive(self, deadline_s: float) -> None:
            await asyncio.Event().wait()

    gone = EvaluatedWorker(NoRoom("generator-0", Dies, [FakeEngine(8), 0]), Weights.unchanged(0), Deadlines())
    workers = await begun(gone, generator(1, Busy))
    config = configure(rollout={"max_num_seqs": 20})
    async with asyncio.timeout(10):
        tables = await generate(workers, PROBLEMS, config, lambda _: Sampling(n=1, max_tokens=4))
    assert {rank for table in tables for rank in table.column("worker").to_pylist()} == {1}
