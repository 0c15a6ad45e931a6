"""Faults at random, of every kind, in a run of three minutes; half an hour of them is benchmarks/system/chaos.py."""

import uuid
from pathlib import Path

import pytest

from benchmarks.system.chaos import parse, under_faults
from tests.flow.run import environment


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_under_faults_no_problem_is_lost_or_trained_twice(tmp_path: Path) -> None:
    options = parse(["--minutes", "2", "--seed", "5", "--every", "9", "13"])
    found = under_faults(tmp_path, options, environment(f"gleaner-test-{uuid.uuid4().hex}"))
    output = (tmp_path / "output.log").read_text()[-5000:]
    assert len(found["faults"]) >= 2, (found, output)  # about ten on two cores that do nothing else
    assert found["exit code"] == 0, (found, output)
    assert found["steps in order"], (found, output)
    assert (found["lost"], found["doubled"], found["processes left"]) == (0, 0, 0), (found, output)
