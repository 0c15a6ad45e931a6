"""A tracker is one class and one row: nothing else has to know of it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from cluster.errors import WrongInput
from cluster.telemetry import Metrics
from cluster.trackers import TRACKERS, Sample, TrackedRun, tracked
from learner.config.load import load_config

REQUIRED = ("model.path=m", "data.path=d.jsonl", "rewards=[{use: number}]")


class Lines:
    """A tracker that writes `step name value`."""

    def __init__(self, run: TrackedRun) -> None:
        self._file = (run.folder / "lines.txt").open("w")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            print(step, name, value, file=self._file)

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        print(step, *(sample["completion"] for sample in samples), file=self._file)

    def close(self) -> None:
        self._file.close()


class Down(Lines):
    """A tracker that fails at its second step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > 1:
            raise ConnectionError("no route\nto host")
        super().log(step, values)


def test_a_row_of_the_table_is_enough_for_a_new_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "lines", Lines)
    config = load_config(None, [*REQUIRED, "trackers=[lines, tensorboard]"])
    metrics = Metrics(tmp_path, config.trackers, resume_step=0)
    metrics.log(1, {"reward/mean": 0.5, "loss/total": nan})
    metrics.completions(1, [{"prompt": "2+2=", "completion": "4", "reward": 1.0}])
    metrics.close()
    assert (tmp_path / "lines.txt").read_text() == "1 reward/mean 0.5\n1 4\n"
    assert list((tmp_path / "tensorboard").iterdir()) != []


def test_a_run_that_goes_back_takes_its_later_steps_out_of_tensorboard(tmp_path: Path) -> None:
    for finished, steps in ((0, (0, 1, 2, 3)), (2, (3, 4))):
        metrics = Metrics(tmp_path, ["tensorboard"], finished)
        for step in steps:
            metrics.log(step, {"reward/mean": step + 0.5 * (finished > 0)})
        metrics.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tensors("reward/mean")
    assert [(one.step, make_ndarray(one.tensor_proto)) for one in found] == [(0, 0), (1, 1), (2, 2), (3, 3.5), (4, 4.5)]


def test_a_run_that_begins_anew_is_another_to_its_trackers(tmp_path: Path) -> None:
    assert (
        tracked(tmp_path, 3).id == hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]
    )  # begun before there was one
    ids = [tracked(tmp_path, finished).id for finished in (0, 3, 0, 7)]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    (tmp_path / "tracker_id").write_text("")  # cut short by a kill
    assert tracked(tmp_path, 7).id not in {*ids, ""}


def test_a_tracker_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(
        WrongInput,
        match=r"trackers\.0: must be one of tensorboard, .*, prometheus, got 'tensorbord'; leave it out",
    ):
        load_config(None, [*REQUIRED, "trackers=[tensorbord]"])


def test_a_tracker_that_fails_costs_one_line_and_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(TRACKERS, "lines", Down)
    metrics = Metrics(tmp_path, ["lines"], resume_step=0)
    for step in (1, 2, 3):
        metrics.log(step, {"reward/mean": 0.5})
    metrics.close()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == (
        "trackers: lines failed (ConnectionError: no route to host); the run goes on without it, metrics.jsonl has "
        "all metrics"
    )
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_tracker_whose_package_is_missing_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Down, "PACKAGE", "no_such_tracker", raising=False)
    monkeypatch.setitem(TRACKERS, "lines", Down)
    with pytest.raises(WrongInput, match=r"trackers\.0: lines needs the package no_such_tracker.*gleaner-rl\[lines\]"):
        load_config(None, [*REQUIRED, "trackers=[lines]"])
