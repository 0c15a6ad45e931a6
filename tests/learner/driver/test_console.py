"""What a person reads of a run's progress."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from learner.driver.console import COLUMNS, Progress, duration
from learner.driver.evaluate import Evaluation
from learner.driver.phases import Phases


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


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"number": 0.5, "a[b]": -1.25}, "step 3/13 reward 0.100 (number 0.500, a[b] -1.250)"),
        ({"number": 0.5}, "step 3/13 reward 0.100"),
    ],
)
def test_several_reward_functions_are_told_apart(own: dict[str, float], told: str) -> None:
    others = {"reward/mean": 0.1, "reward/std": 1.0, "reward/failed": 0.5, "reward/status_error": 2.0, "reward/ms": 3.0}
    metrics = others | {f"reward/{name}": value for name, value in own.items()}
    said = io.StringIO()
    Progress(13, Console(file=said, width=200)).step(3, metrics)
    assert said.getvalue() == f"{told}\n"
    on_terminal = Console(width=120, force_terminal=True, file=io.StringIO(), color_system=None)
    with Progress(13, on_terminal) as progress:
        progress.step(3, metrics)
        assert ("number 0.500" in str(progress._status)) == (len(own) > 1)


def summary(run_dir: Path, *evaluations: Evaluation) -> str:
    said = io.StringIO()
    Progress(total_steps=4, console=Console(file=said, width=200)).summary(evaluations, run_dir, Phases(), [])
    return said.getvalue()


def test_on_a_narrow_terminal_the_mismatch_keeps_its_exponent() -> None:
    console = Console(width=80, force_terminal=True, file=io.StringIO(), color_system=None)
    with Progress(20, console) as progress:
        progress.step(10, {key: 4.8e-06 for key, _ in COLUMNS.values()})
        console.print(progress._picture())
    assert isinstance(console.file, io.StringIO)
    assert "4.8e-06" in console.file.getvalue()


def test_what_one_of_two_evaluations_lacks_is_a_dash_and_uncounted_is_none(tmp_path: Path) -> None:
    first = Evaluation(0, {"eval/accuracy": 0.25, "eval/gone": 0.5}, [])
    last = Evaluation(4, {"eval/accuracy": 0.75, "eval/unscored": 2.0, "eval/x[/y]": 1.0}, [])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in summary(tmp_path, first, last).splitlines()]
    assert [row for row in rows if row] == [
        ["eval/accuracy", "0.250", "0.750", "+0.500"],
        ["eval/gone", "0.500", "-", "-"],
        ["eval/unscored", "0.000", "2.000", "+2.000"],
        ["eval/x[/y]", "-", "1.000", "-"],
    ]


def test_the_terminal_gets_no_command_of_a_model_s(tmp_path: Path) -> None:
    sample = {"prompt": "\x1b[2Jsum?", "completion": "\x1b]0;pwned\x07\u202e[red]4", "reward": 1.0}
    said = summary(tmp_path, Evaluation(0, {"eval/\x1b[31m": 1.0}, [sample]), Evaluation(4, {}, [sample]))
    assert not set(said) & set("\x1b\x07\u202e")
    assert r"prompt  \x1b[2Jsum?" in said
    assert r"before  \x1b]0;pwned\x07\u202e[red]4  (reward 1)" in said
    assert r"after   \x1b]0;pwned\x07\u202e[red]4  (reward 1)" in said
