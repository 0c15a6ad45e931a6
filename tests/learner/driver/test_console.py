"""What a person reads of a run's progress."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from learner.driver.console import Progress, duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1 h 30 min"), (11100, "3 h 05 min")],
)
def test_a_duration_is_said_in_the_unit_that_a_person_waits_in(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_time_left_is_that_of_a_usual_step_for_each_one_to_come() -> None:
    said = io.StringIO()
    progress = Progress(total_steps=13, console=Console(file=said, width=200))
    progress.step(0, {"eval/accuracy": 0.25})
    for step, seconds in enumerate((30.0, 5.0, 5.0), 1):  # the first one compiles
        progress.step(step, {"time/step": seconds, "reward/mean": 0.5})
    first, *later = said.getvalue().splitlines()
    assert first == "step 0/13 accuracy 0.250"
    assert [line.split(", ")[-1] for line in later] == ["6 min left", "3 min left", "50 s left"]
