"""Where the time of a run went: by hand, of a run in one process, and as it is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cluster.telemetry import Timeline
from learner.driver.console import (
    Phases,
    age,
    read_phases,
    sentence,
)
from tests.learner.loops import build, configure, finish


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
