"""`gleaner rewards try`: saved rollouts scored with another reward, as training would score them."""

from pathlib import Path

import pytest

from learner.tools.cli import main
from rollout import ledger
from rollout.fakes import make_group

REWARD = '''
def by_length(prompts, completions, **columns):
    """Even lengths are good."""
    return [float(len(completion) % 2 == 0) for completion in completions]

def broken(prompts, completions, **columns):
    return [1.0]


calls = []


def broken_later(prompts, completions, **columns):
    calls.append(1)
    return [1.0] * (len(completions) if len(calls) == 1 else 1)
'''


@pytest.fixture
def rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(REWARD)
    for step in (1, 2):
        groups = [make_group(2 * step + i, rewards=[0.0, 1.0], completion=["xx", "xxx"]) for i in range(2)]
        ledger.write(Path("rollouts"), step, groups)
    return Path("rollouts")


def test_the_distribution_is_shown(rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "try", "mine.py:by_length", "--rollouts", str(rollouts), "--steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert "mine.py:by_length: 4 completions of 2 groups, step-000002.parquet to step-000002.parquet" in printed
    assert "outcomes   ok 4" in printed
    assert "mean 0.5000  std 0.5000  min 0.0000  max 1.0000" in printed
    assert "highest  1.0000  xx\nlowest   0.0000  xxx\n" in printed
    assert "correlation with the recorded reward: -1.000" in printed  # the recorded one likes the longer


def test_what_is_wrong_is_said(rollouts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "try", "mine.py:broken", "--rollouts", str(rollouts)]) == 2
    assert "returned 1 values for 2 completions" in capsys.readouterr().err
    assert main(["rewards", "try", "mine.py:broken_later", "--rollouts", str(rollouts)]) == 0
    assert "outcomes   error 6, ok 2" in capsys.readouterr().out
    assert main(["rewards", "try", "mine.py:by_length", "--rollouts", "nowhere"]) == 2
    assert "nowhere holds no step-*.parquet" in capsys.readouterr().err
    assert main(["rewards", "try", "mine.py:absent", "--rollouts", str(rollouts)]) == 2
    assert "absent" in capsys.readouterr().err
    assert main(["rewards", "try", "format", "--rollouts", str(rollouts), "--timeout", "0"]) == 2
    assert capsys.readouterr().err == "error: timeout_s: Input should be greater than 0 (got 0.0)\n"
    (rollouts / "step-000002.parquet").write_bytes(b"PAR1 cut short")
    assert main(["rewards", "try", "format", "--rollouts", str(rollouts)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step-000002.parquet cannot be read" in line
