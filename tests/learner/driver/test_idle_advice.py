"""What is said of idle times, by hand."""

from typing import Any

import pytest

from learner.config import RunConfig
from learner.driver.record import IdleTimes, advice

CARDS = {"gpus": {"generator": 1, "learner": 1}}


def configure(max_staleness: int, cluster: dict[str, Any] | None = None) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "d.jsonl"},
            "rewards": [{"use": "format"}],
            "max_staleness": max_staleness,
            "cluster": cluster or {},
        }
    )


def step(total: float, generator_idle: float, learner_idle: float, **more: float) -> dict[str, float]:
    spent = {"time/step": total, "time/generator_idle": generator_idle, "time/learner_idle": learner_idle}
    return spent | {"time/evaluate": 0.0, "time/checkpoint": 0.0, "reward/ms": 250.0} | more


def test_steps_with_an_evaluation_or_a_checkpoint_in_them_do_not_count() -> None:
    idle = IdleTimes()
    idle.add(step(10, 4, 6))
    idle.add(step(90, 1, 89, **{"time/evaluate": 80.0}))
    idle.add(step(50, 1, 49, **{"time/checkpoint": 40.0}))
    idle.add(step(10, 5, 5))
    assert idle == IdleTimes(20, 9, 11, 0.5)


@pytest.mark.parametrize(
    ("idle", "config", "words"),
    [
        # 10 s, generators busy for 6 of them, the learner for 4: overlapped a step takes 6, hence 10 / 6 = 1.7.
        (IdleTimes(10, 4, 6), configure(0, CARDS), ["40 %", "60 %", "max_staleness=1", "at most 1.7 times"]),
        (IdleTimes(10, 4, 6), configure(0), ["at most 1.7 times", "here they share it"]),
        (IdleTimes(10, 0, 5), configure(1), ["generation is the longer side", "rollout.workers"]),
        (IdleTimes(10, 5, 0), configure(1), ["training is the longer side"]),
        (IdleTimes(10, 5, 0, 9), configure(1), ["training is the longer side"]),
        (
            IdleTimes(10, 4, 6, 3.2),
            configure(0),
            ["reward took 32 % of the time of a step;", "rollout.reward_workers"],
        ),
    ],
)
def test_the_longer_side_and_the_bound_are_named(idle: IdleTimes, config: RunConfig, words: list[str]) -> None:
    told = advice(idle, config)
    assert told is not None
    assert [word for word in words if word not in told.replace("%", " %")] == []


@pytest.mark.parametrize(
    ("idle", "max_staleness"),
    [
        (IdleTimes(), 0),
        (IdleTimes(10, 1, 1), 0),
        (IdleTimes(10, 9.5, 0.5), 0),
        (IdleTimes(10, 1.4, 1), 1),
        (IdleTimes(10, 1, 1, 2.6), 1),
    ],
)
def test_without_a_gain_nothing_is_said(idle: IdleTimes, max_staleness: int) -> None:
    assert advice(idle, configure(max_staleness)) is None
