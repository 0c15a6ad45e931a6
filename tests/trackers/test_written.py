"""What trackers have written, read back from their own files: `make test-trackers`. No network."""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.telemetry import Metrics
from cluster.trackers import tracked

pytestmark = pytest.mark.filterwarnings("ignore")  # those libraries' own
SAMPLES = [{"prompt": [{"role": "user", "content": "2+2="}], "completion": "<b>4</b>", "reward": 1.0}]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "it's" / "my-run"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": 3, "learner": {"lora": {"rank": 8}}}))
    return folder


def two_steps(run_dir: Path, name: str) -> None:
    """Two steps, and a resumed run that takes the second again, with another result, and a third."""
    for first, resumed in ((1, 0), (2, 1)):
        metrics = Metrics(run_dir, [name], resumed)
        for step in (first, first + 1):
            values = {
                "reward/mean": step / 4 + resumed,
                "env/pass@1": 0.5,
                "env//../数/": 1.0,
                "env/" + 300 * "x": 2.0,
                "loss/total": float("nan"),
            }
            metrics.log(step, values)
        metrics.completions(first + 1, SAMPLES)
        metrics.close()


def records(data: bytes) -> Iterator[bytes]:
    """Of a .wandb file: seven bytes, then LevelDB's log format, blocks of 32 KiB with records that may span them."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_mlflow_has_curves_settings_and_completions_in_one_run(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    two_steps(run_dir, "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{run_dir}/mlflow.db")
    (experiment,) = (e for e in client.search_experiments() if e.name == "gleaner")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("my-run", "FINISHED")
    assert run.data.params == {"seed": "3", "learner.lora.rank": "8"}
    found = {(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "reward/mean")}
    assert found == {(1, 0.25), (2, 0.5), (2, 1.5), (3, 1.75)}
    assert run.data.metrics["env/pass_1"] == 0.5  # MLflow takes no @, no detours and no name that is too long
    assert (run.data.metrics["env/数"], run.data.metrics["env/" + 246 * "x"]) == (1.0, 2.0)
    assert json.loads((next(run_dir.glob("mlflow/**/step-3.json"))).read_text()) == {"samples": SAMPLES}


def test_trackio_has_curves_and_settings(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(run_dir / "trackio"))  # read as it is imported
    pytest.importorskip("trackio")
    two_steps(run_dir, "trackio")
    with sqlite3.connect(run_dir / "trackio" / "gleaner.db") as db:
        rows = db.execute("select run_name, step, metrics from metrics order by id").fetchall()
    told = [(step, json.loads(text)) for _, step, text in rows]
    steps = [(step, values["reward/mean"]) for step, values in told if "reward/mean" in values]
    assert {name for name, _, _ in rows} == {f"my-run-{tracked(run_dir, 3).id[:6]}"}
    assert steps == [(1, 0.25), (2, 0.5), (2, 1.5), (3, 1.75)]
    assert any("completions" in values for _, values in told)


def test_wandb_offline_has_curves_and_a_table(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    two_steps(run_dir, "wandb")
    history: list[dict[str, str]] = []
    settings: dict[str, str] = {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            history.append({"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item})
            settings |= {i.key: i.value_json for i in record.run.config.update}
    curve = [(int(h["step"]), float(h["reward/mean"])) for h in history if "reward/mean" in h]
    assert curve == [(1, 0.25), (2, 0.5), (2, 1.5), (3, 1.75)]
    assert settings["learner.lora.rank"] == "8"
    (table, _) = sorted(run_dir.glob("wandb/offline-run-*/files/media/table/**/*.json"))
    assert json.loads(table.read_text())["data"][0][2:] == ["<b>4</b>", 1.0]


def test_wandb_without_a_login_costs_one_line(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(run_dir))
    metrics = Metrics(run_dir, ["wandb"], 0)
    metrics.log(1, {"reward/mean": 0.5})
    metrics.close()
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("trackers: wandb failed (RuntimeError: it wants a login: run `wandb login`, or set")
    assert json.loads((run_dir / "metrics.jsonl").read_text())["reward/mean"] == 0.5


def test_an_mlflow_server_that_is_down_costs_one_line(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    metrics = Metrics(run_dir, ["mlflow"], 0)
    metrics.log(1, {"reward/mean": 0.5})
    metrics.close()
    assert ["trackers: mlflow failed" in record.getMessage() for record in caplog.records].count(True) == 1
