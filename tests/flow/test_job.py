"""`ray job submit` on a real head with token authentication: success, output that stays, a stop that checkpoints."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.random_model import make_tiny_model
from learner.driver import checkpoint
from tests.flow.run import Run, metrics_page, wait_until

BIN = Path(sys.executable).parent


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Head:
    """A Ray head of our own, beside whatever else runs on the machine."""

    def __init__(self, run: Run, home: Path) -> None:
        self.env = run.environment() | {
            "HOME": str(home),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
        }
        subprocess.run([BIN / "ray", "get-auth-token", "--generate"], env=self.env, check=True, capture_output=True)
        self.temp = Path(tempfile.mkdtemp(prefix="gj-", dir="/tmp"))  # short: socket paths end at 107 bytes
        dashboard, ports = _free_port(), [_free_port() for _ in range(2)]
        self.address = f"http://127.0.0.1:{dashboard}"
        self.process = subprocess.Popen(
            [
                *(BIN / "ray", "start", "--head", "--block", "--num-cpus=2", "--disable-usage-stats"),
                *(f"--port={20000 + ports[0] % 10000}", f"--dashboard-port={dashboard}", f"--temp-dir={self.temp}"),
                *(f"--dashboard-agent-listen-port={ports[1]}", f"--object-store-memory={128 << 20}"),
            ],
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(lambda: self._job("list").returncode == 0, "the job server to answer", seconds=90)

    def submit(self, run: Run, *words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        """`ray job submit --working-dir <folder of the configuration> -- python -m learner.main …`"""
        entry = ["--", "python", "-m", "learner.main", "--config", "config.yaml", *words]
        return self._job("submit", "--working-dir", str(run.config.parent), *options, *entry)

    def job(self, verb: str, name: str) -> str:
        """`ray job <verb> <name>`: what it printed."""
        done = self._job(verb, name)
        return done.stdout + done.stderr

    def _job(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        command: list[str | Path] = [BIN / "ray", "job", verb, "--address", self.address, *words]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=300)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Run:
    return Run(tmp_path / "w", model, output_dir="results", steps=2)


@pytest.fixture
def head(tmp_path: Path, run: Run) -> Iterator[Head]:
    home = tmp_path / "home"
    home.mkdir()
    head = Head(run, home)
    yield head
    head.close()


@pytest.mark.long
@pytest.mark.timeout(800)
def test_jobs(head: Head, run: Run, tmp_path: Path) -> None:
    done = head.submit(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SUCCEEDED" in done.stdout or "succeeded" in done.stdout
    kept = tmp_path / "home" / "results" / "run"  # a relative output_dir is the home folder's, not the job's
    assert str(kept) in done.stdout
    assert [json.loads(line)["step"] for line in (kept / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert (kept / "adapter" / "adapter_model.safetensors").exists()

    patience = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}})
    options = ("--no-wait", "--submission-id", "long", "--runtime-env-json", patience)
    long = ("steps=100000", "name=long", "trackers=[prometheus]")
    assert head.submit(run, *long, options=options).returncode == 0
    folder = tmp_path / "home" / "results" / "long"
    wait_until(lambda: (folder / "rollouts" / "step-000002.parquet").exists(), "two steps of the second job", 300)
    wait_until(lambda: "ray_gleaner_step" in metrics_page(folder), "a step on the page of Ray's agent")
    ((address,),) = (group["targets"] for group in json.loads((folder / "prometheus.json").read_text()))
    assert address in (head.temp / "prom_metrics_service_discovery.json").read_text()  # Ray's own list of its nodes
    head.job("stop", "long")
    wait_until(lambda: "was stopped" in head.job("status", "long"), "the second job to stop")
    newest, _ = checkpoint.newest(folder / "checkpoints")
    assert newest is not None
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert checkpoint.step_of(newest) == last
    assert "stopping after this step" in head.job("logs", "long")
