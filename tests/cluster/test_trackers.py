"""A tracker is one class and one row: nothing else has to know of it."""

from collections.abc import Mapping
from math import nan
from pathlib import Path

import pytest

from cluster.telemetry import Metrics
from cluster.trackers import TRACKERS
from learner.driver.config_io import ConfigError, load

REQUIRED = ("model.path=m", "data.path=d.jsonl", "rewards=[{use: number}]")


class Lines:
    """A tracker that writes `step name value`."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / "lines.txt").open("w")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            print(step, name, value, file=self._file)

    def close(self) -> None:
        self._file.close()


def test_a_row_of_the_table_is_enough_for_a_new_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRACKERS, "lines", Lines)
    config = load(None, [*REQUIRED, "trackers=[lines, tensorboard]"])
    metrics = Metrics(tmp_path, config.trackers, resume_step=0)
    metrics.log(1, {"reward/mean": 0.5, "loss/total": nan})
    metrics.close()
    assert (tmp_path / "lines.txt").read_text() == "1 reward/mean 0.5\n"
    assert list((tmp_path / "tensorboard").iterdir()) != []


def test_a_tracker_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"trackers\.0: must be one of tensorboard, got 'tensorbord'; leave it out"):
        load(None, [*REQUIRED, "trackers=[tensorbord]"])
