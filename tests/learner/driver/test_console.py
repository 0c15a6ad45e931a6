"""What a person reads of a run's progress. Where the time of a run went: by hand, of a run in one process, and as it
is told. What reward functions of a run print: kept in its folder, and its first lines said once.
"""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.memory.seconds import duration
from cluster.telemetry import Timeline
from learner.driver import console
from learner.driver.console import (
    COLUMNS,
    Phases,
    Progress,
    RewardOutput,
    age,
    read_phases,
    sentence,
)
from learner.driver.evaluate import Evaluation
from rewards.call import Group
from rewards.config import RewardConfig
from rewards.limits import NAME
from rewards.pool import RewardPool
from tests.learner.loops import build, configure, finish


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
    assert [line.split(", ")[-1] for line in later] == ["6 min left", "55 s left", "50 s left"]


def test_the_time_left_has_the_evaluations_to_come_and_counts_none_as_a_step() -> None:
    said = io.StringIO()
    progress = Progress(6, "float32", Console(file=said, width=200), evaluates=3)
    before = {1: 100.0, 4: 80.0}  # seconds of the evaluations of step 0 and of step 3, which the next step tells
    for step in range(1, 7):
        taken = before.get(step, 0.0)
        progress.step(step, {"time/step": (8.0 if step % 2 else 12.0) + taken, "time/evaluate": taken})
    told = [line.split(", ")[-1] for line in said.getvalue().splitlines()]
    # 2 to come at 100 s and 5 steps at 8; 4 at 12; 3 at 10; then 1 at 90 and 2 at 32/3; 1 at 10; 0
    assert told == ["4 min left", "4 min left", "4 min left", "2 min left", "2 min left", "2 min left"]


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


# Where the time of a run went: by hand, of a run in one process, and as it is told.


class Clock:
    """time.perf_counter that stands still."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    Clock.now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    return Clock


def test_of_what_went_on_at_once_the_first_counts_and_all_adds_up(tmp_path: Path, clock: type[Clock]) -> None:
    phases, timeline = Phases(began=0.0), Timeline(tmp_path / "timeline.json")
    clock.now = 3.0
    phases.until_now("preflight")
    clock.now = 4.0
    with timeline.span("generate", "generator-0", concurrent=True):  # 4 to 10
        clock.now = 6.0
        with timeline.span("train", "learner"):  # 6 to 7
            clock.now = 7.0
        with timeline.span("policy", "learner"), timeline.span("push", "loop"):  # 7 to 7.5
            clock.now = 7.5
        with timeline.span("evaluate", "loop"):  # 7.5 to 9.5
            clock.now = 9.0
            phases.split(timeline, "other")  # of spans that are still open, what has been
            timeline.forget_before(3.0)
            clock.now = 9.5
        clock.now = 10.0
    with timeline.span("push", "loop"):  # 10 to 11
        clock.now = 11.0
    clock.now = 11.25
    phases.split(timeline, "other")
    clock.now = 12.0
    phases.until_now("end")
    timeline.close()
    assert phases.seconds == pytest.approx(
        {
            "preflight": 3, "evaluation": 2, "checkpoints": 0, "training": 1.5, "generation": 2.5, "weight sync": 1,
            "other": 1.25, "end": 0.75,
        }
    )  # fmt: skip
    assert phases.wall == sum(phases.seconds.values()) == 12
    for resumed in (True, False, True):  # of the second a run began anew
        phases.record(tmp_path, resumed)
    with (tmp_path / "phases.jsonl").open("a") as file:  # NaN, too little, still being written
        file.write('{"at": 1, "wall": NaN}\n{"at": 1}\n[]\n{"at": 1, "wa')
    lines = read_phases(tmp_path)
    assert [line["wall"] for line in lines] == [12, 12]
    assert sum(value for name, value in lines[0].items() if name not in ("at", "wall")) == pytest.approx(12)
    assert read_phases(tmp_path / "absent") == []
    assert sentence(phases.seconds) == (
        "12.0 s: start-up 3.0 (preflight 3.0, Ray 0.0, processes 0.0), evaluation 2.0, checkpoints 0.0, training 1.5, "
        "generation 2.5, weight sync 1.0, other 1.2, end 0.8"
    )


async def test_the_phases_of_a_run_are_those_of_its_steps(tmp_path: Path) -> None:
    run = build(tmp_path, configure(), 4, pace_s=1e-3, trainer_s=2e-3)
    await finish(run)
    phases: Any = run.sinks.phases
    assert all(phases.seconds[name] > 0 for name in ("evaluation", "checkpoints", "training", "generation"))
    assert phases.wall == pytest.approx(sum(phases.seconds.values()))


def test_the_age_of_this_process() -> None:
    before = age()
    time.sleep(0.05)
    assert 0.05 <= age() - before < 5
    assert before > 0


# What reward functions of a run print: kept in its folder, and its first lines said once.


@pytest.mark.parametrize(
    "code", ["print(one)", "import sys; sys.stderr.write(one + chr(10))", "os.system('echo ' + one)"]
)
def test_lines_are_kept_said_once_and_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str) -> None:
    (tmp_path / NAME).write_text("of an earlier start\n")
    found = RewardOutput(tmp_path)
    assert (found.first(), found.total()) == ("", "")
    (tmp_path / "loud.py").write_text(
        f"import os\ndef loud(completions):\n    for one in completions:\n        {code}\n    return [1.0] * 5\n"
    )

    async def score() -> None:
        async with RewardPool([RewardConfig(use=f"{tmp_path}/loud.py:loud")], printed=tmp_path / NAME) as pool:
            for _ in range(2):
                await pool.score(Group(["p"] * 5, ["a" * 200, "b", "c", "d", "e"], [[1]] * 5, {}))

    asyncio.run(score())
    assert found.first() == (f"reward functions print, into {tmp_path / NAME}; its first lines: {'a' * 100} | b | c")
    assert (found.first(), found.total()) == ("", f"reward functions printed 10 lines, into {tmp_path / NAME}")
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("before", "printed"), [(0, 300), (40, 17)])
def test_it_grows_no_further_than_it_may_and_what_is_left_out_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, printed: int
) -> None:
    monkeypatch.setattr(console, "MOST_LINES", 120)
    file = tmp_path / NAME
    file.write_text("0123456\n" * (before // 8))
    found = RewardOutput(tmp_path)
    assert found.bound() == ""
    lines = 0
    with file.open("ab") as open_elsewhere:  # as functions write
        for turn in range(3):
            for _ in range(printed):
                open_elsewhere.write(b"0123456\n")
            open_elsewhere.flush()
            lines += printed
            told = found.bound()
            assert (str(file) in told and "what follows is left out" in told) == (turn == 0)
            assert file.stat().st_size == 120
    kept = (120 - before) // 8
    assert found.total() == f"reward functions printed {lines} lines, into {file}, of which {lines - kept} are left out"
