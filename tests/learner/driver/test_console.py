"""What a person reads of a run's progress."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from learner.driver.console import COLUMNS, Phases, Progress, duration
from learner.driver.evaluate import Evaluation


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (5400, "1 h 30 min"), (11100, "3 h 05 min")],
)
def test_a_duration_is_said_in_the_unit_that_a_person_waits_in(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_time_left_is_that_of_a_usual_step_for_each_one_to_come() -> None:
    said = io.StringIO()
    progress = Progress(13, "float32", console=Console(file=said, width=200))
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
    Progress(13, "float32", Console(file=said, width=200)).step(3, metrics)
    assert said.getvalue() == f"{told}\n"
    on_terminal = Console(width=120, force_terminal=True, file=io.StringIO(), color_system=None)
    with Progress(13, "float32", on_terminal) as progress:
        progress.step(3, metrics)
        assert ("number 0.500" in str(progress._status)) == (len(own) > 1)


def summary(run_dir: Path, *evaluations: Evaluation) -> str:
    said = io.StringIO()
    Progress(4, "float32", console=Console(file=said, width=200)).summary(evaluations, run_dir, Phases(), [])
    return said.getvalue()


def test_on_a_narrow_terminal_the_mismatch_keeps_its_exponent() -> None:
    console = Console(width=80, force_terminal=True, file=io.StringIO(), color_system=None)
    with Progress(20, "float32", console) as progress:
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
    assert r"both    \x1b]0;pwned\x07\u202e[red]4  (reward 1)" in said


def test_the_examples_at_the_end_are_those_that_changed(tmp_path: Path) -> None:
    def samples(*said: tuple[str, float]) -> list[dict[str, Any]]:
        return [{"prompt": f"p{i}", "completion": text, "reward": reward} for i, (text, reward) in enumerate(said)]

    before = samples(("a", 0.0), ("b", 0.0), ("c", 0.0), ("d", 1.0), ("e", 0.0))
    after = samples(("a", 0.0), ("B", 0.0), ("C", 1.0), ("D", 1.0), ("E", 0.5))
    said = summary(tmp_path, Evaluation(0, {}, before), Evaluation(4, {}, after))
    assert [line for line in said.splitlines() if line.startswith(("prompt", "after"))] == [
        "prompt  p2", "after   C  (reward 1)", "prompt  p4", "after   E  (reward 0.5)", "prompt  p1",
        "after   B  (reward 0)",
    ]  # fmt: skip
    assert "examples 4 of the first 5 held-out completions are others than before" in said
    stopped = summary(tmp_path, Evaluation(0, {}, before))
    assert stopped.count("prompt") == stopped.count("before") == 3


@pytest.mark.parametrize(
    ("dtype", "mismatches", "told"),
    [("bfloat16", [1e-3, 2e-3, 6e-3], [True, False, True]), ("float32", [1e-8, 1e-4], [True, True])],
)
def test_the_mismatch_is_told_with_what_is_usual(dtype: str, mismatches: list[float], told: list[bool]) -> None:
    said = io.StringIO()
    progress = Progress(13, dtype, Console(file=said, width=200))
    progress.step(1, {"policy/mismatch_k3": 0.5, "policy/staleness_mean": 1.0})  # the policy's own change is in it
    for step, mismatch in enumerate(mismatches, 2):
        progress.step(step, {"policy/mismatch_k3": mismatch, "policy/staleness_mean": 0.0})
    assert [f"usual in {dtype}" in line for line in said.getvalue().splitlines()] == [False, *told]
