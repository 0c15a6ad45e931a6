"""Where a metric broke: found at its step, and not where there is only noise or learning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.tools.cli import main
from learner.tools.replay.command import change_of, worse

STEPS = list(range(1, 61))
RISING = 1 / (1 + np.exp(-(np.arange(60) - 20) / 6))


def noise(seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=60)


def test_a_fall_is_found_at_its_step_and_nothing_where_there_is_none() -> None:
    fallen = [change_of(STEPS, 0.05 * noise(seed) + RISING - 0.3 * (np.arange(60) >= 40), -1) for seed in range(50)]
    places = [change.first for change in fallen if change is not None]
    assert len(places) >= 48
    assert sum(abs(place - 41) <= 1 for place in places) >= 47
    assert [change_of(STEPS, noise(seed), direction) for seed in range(50) for direction in (-1, 1)] == [None] * 100
    assert [change_of(STEPS, 0.05 * noise(seed) + RISING, -1) for seed in range(50)] == [None] * 50
    assert change_of(STEPS, [0.5] * 60, 0) is None
    counted = change_of(STEPS, [0.0] * 50 + [1.0] * 10, 1)  # of values that are mostly equal
    assert counted is not None
    assert (counted.last, counted.first, counted.before, counted.after) == (50, 51, 0, 1)


@pytest.mark.parametrize(
    ("metric", "way"),
    [
        ("reward/mean", -1), ("reward/failed", 1), ("policy/mismatch_k3", 1), ("eval/accuracy", -1), ("loss/total", 0),
        ("env/found", 0), ("eval/found", 0), ("eval/lost", -1), ("env/malformed", 1), ("eval/malformed", 1),
        ("eval/turns", 0), ("eval/seconds", 1), ("eval/outcome_done", 0), ("eval/outcome_env_killed", 1),
        ("eval/outcome_correct", -1),
    ],
)  # fmt: skip
def test_which_way_is_worse(metric: str, way: int) -> None:
    """Of a run whose environment counts what was found, and with reward functions called lost and outcome_correct."""
    known = {
        "reward/lost",
        "reward/outcome_correct",
        *(f"env/{name}" for name in ("found", "turns", "malformed", "seconds")),
    }
    assert worse(metric, known) == way


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Its mismatch jumps at step 39, its reward falls at step 41; evaluated every ten steps."""
    (tmp_path / "rollouts").mkdir()
    reward, mismatch = 0.02 * noise(1) + 0.8, 1e-4 * (1 + 0.1 * noise(2))
    reward[40:] -= 0.5
    mismatch[38:] += 2e-3
    lines = [
        {"step": step, "at": 0.0, "reward/mean": r, "policy/mismatch_k3": k, "env/a[/b]": k}
        for step, r, k in zip(STEPS, reward, mismatch, strict=True)
    ]
    for line in lines[9::10]:
        line["eval/accuracy"] = 0.8 - 0.6 * (line["step"] > 40) + 0.001 * line["step"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_what_broke_before_it_is_shown_with_it(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(broken), "--bisect", "reward/mean", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["change"]["last"], told["change"]["first"]) == (40, 41)
    assert told["change"]["after"] == pytest.approx(0.3, abs=0.05)
    assert told["others"]["policy/mismatch_k3"]["first"] == 39
    assert main(["replay", str(broken), "--bisect", "reward/mean"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "reward/mean fell from 0.8" in out
    assert "env/a[/b]" in out
    assert f"gleaner rollouts show {broken} --step 41 --worst" in out


def test_of_a_metric_that_is_not_there_at_each_step_the_steps_between_can_be_had(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(broken), "--bisect", "eval/accuracy"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "in steps 40 to 50" in out
    assert f"gleaner replay {broken} --to 45 --output at-45 && gleaner eval --run at-45" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bisect", "reward/maen"], "--bisect: must be a metric of the run, got reward/maen; did you mean reward/m"),
        (["--bisect", "reward/mean", "seed=1"], "--bisect: looks at what the run recorded and takes no step"),
        (["--bisect", "reward/mean", "--to", "4"], "--bisect: looks at what the run recorded and takes no step"),
    ],
)
def test_what_it_cannot_say(broken: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["replay", str(broken), *words]) == 2
    assert f"error: {said}" in capsys.readouterr().err


def test_few_values_say_nothing(broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (broken / "metrics.jsonl").read_text().splitlines(keepends=True)
    (broken / "metrics.jsonl").write_text("".join(lines[:5]))
    assert main(["replay", str(broken), "--bisect", "reward/mean"]) == 2
    assert "needs at least 6 values of reward/mean" in capsys.readouterr().err
