"""What the benchmarks of whole systems make of a run's own times, by hand."""

import argparse
from typing import Any

import pytest

from benchmarks.system.system_run import Mode, Record, RunFailed, _steps


def line(step: float, evaluate: float = 0.0) -> dict[str, float]:
    """A line of metrics.jsonl of which a quarter was generation."""
    parts = {"generate": step / 4, "train": step / 2, "overlap": 0.0, "checkpoint": 0.0, "evaluate": evaluate}
    return {"rollout/tokens": 100.0, "time/step": step} | {f"time/{part}": value for part, value in parts.items()}


def record(steps: list[dict[str, float]], **more: Any) -> Record:
    return Record("x", 0, "float32", 0.0, 0.0, 0.0, steps, [1], 1.0, **more)


def test_a_step_that_gained_from_an_evaluation_is_charged_at_least_the_median_of_the_others() -> None:
    lines = [line(10, evaluate=7), line(4), line(8, evaluate=7), line(1), line(4), line(6)]
    sync, ahead = (_steps(lines, [8] * 6, staleness) for staleness in (0, 1))
    assert [step["seconds"] for step in sync] == [4, 4, 4, 1, 4, 6]  # 10 - 7 and 8 - 7, raised to median(4, 1, 4, 6)
    assert [step["seconds"] for step in ahead] == [5, 5, 5, 5, 4, 6]  # only the last two had no head start
    assert record(sync).rate(skip=0) == 8 * 4 / (4 + 1 + 4 + 6)
    assert record(sync).other(skip=4) == pytest.approx(5 / 4)
    with pytest.raises(RunFailed, match="evaluate less often"):
        _steps(lines[:2], [8, 8], 1)


def test_seconds_to_an_accuracy_are_those_before_the_first_evaluation_that_reached_it() -> None:
    run = record([{"seconds": 1.0}, {"seconds": 2.0}, {"seconds": 4.0}], accuracy=[(0, 0.2), (2, 0.9), (3, 0.8)])
    assert (run.seconds_to(0.2), run.seconds_to(0.85), run.seconds_to(0.95)) == (0.0, 3.0, None)


def test_a_mode_is_read_or_refused() -> None:
    assert Mode.parse("1:2/3") == Mode(staleness=1, generator=2, learner=3)
    assert Mode.parse("1:1/1x2:continue") == Mode(1, 1, 1, "continue", ranks=2)
    with pytest.raises(argparse.ArgumentTypeError, match="must be STALENESS:CORES/CORES"):
        Mode.parse("1:2")
