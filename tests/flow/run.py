"""Starts whole runs in processes of their own and sees what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.common import marked

REWARD = '''
def vowels(prompts, completions, **columns):
    """Share of vowels: a random model can move it."""
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in texts]
'''


def environment(marker: str) -> dict[str, str]:
    """Ours without what pytest's own process needs, and with a mark that all descendants inherit. Ray's workers are as
    important as other tests beside them: with Ray's niceness of 15 a generator needed three minutes to start there."""
    own = ("RAY_", "VLLM_", "TORCH_COMPILE", "OMP_")
    added = {"XDG_GLEANER_MARK": marker, "PYTHONFAULTHANDLER": "1", "RAY_worker_niceness": "0"}
    return {k: v for k, v in os.environ.items() if not k.startswith(own)} | added


class Run:
    """One run folder, one configuration, any number of tries."""

    def __init__(self, folder: Path, model: Path, **changes: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "my_rewards.py").write_text(REWARD)
        rows = [{"question": f"Say something about {word}", "answer": word} for word in "abcdefghijklmnopqrst"]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config: dict[str, Any] = {
            "name": "run",
            "output_dir": str(folder / "runs"),
            "steps": 4,
            "model": {"path": str(model), "dtype": "float32"},
            "data": {"path": str(folder / "data.jsonl"), "eval": {"size": 2, "every": 2}},
            "rewards": [{"use": f"{folder / 'my_rewards.py'}:vowels"}],
            "rollout": {
                "num_generations": 4,
                "max_prompt_length": 96,
                "max_completion_length": 24,
                "kv_cache": "32MiB",
            },
            "learner": {"groups_per_step": 3, "learning_rate": 1e-3},
            "checkpoint": {"every": 2},
            "trackers": [],
        }
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(config | changes))
        self.folder = folder / "runs" / "run"
        self.marker = f"gleaner-test-{uuid.uuid4().hex}"

    def start(self, *overrides: str, program: tuple[str, str] = ("-m", "learner.main")) -> subprocess.Popen[str]:
        """A new process of `python -m learner.main`, or of another program with its arguments."""
        return subprocess.Popen(
            [sys.executable, *program, "--config", str(self.config), *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(),
            start_new_session=True,
        )

    def environment(self) -> dict[str, str]:
        return environment(self.marker)

    def finish(self, *overrides: str, limit: float = 300) -> str:
        """Runs to the end within so many seconds, and it must be a good one; returns what was printed."""
        process = self.start(*overrides)
        output, _ = self.communicate(process, limit)
        assert process.returncode == 0, output
        return output

    def gleaner(self, *words: str, cwd: Path | None = None) -> str:
        """What a command of gleaner prints to stdout, which must succeed."""
        process = subprocess.Popen(
            [sys.executable, "-m", "learner.tools.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=self.environment(), cwd=cwd,
        )  # fmt: skip
        output, errors = self.communicate(process, 300)
        assert process.returncode == 0, f"{output}\n{errors}"
        return output

    def communicate(self, process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
        """What the process printed. If it does not end in time, fails with the stacks of all processes of this run."""
        try:
            return process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            stacks = self._stacks(process.pid)
            process.kill()
            output, errors = process.communicate()
            raise AssertionError(f"no end within {seconds} s\n{stacks}\n{output}\n{errors}") from None

    def _stacks(self, driver: int) -> str:
        """Ends all processes of this run by SIGABRT, at which Python's fault handler writes the stacks: those of Ray's
        workers into Ray's logs, that of the driver to its stderr. Returns the logs' ends."""
        found = self.processes()
        for pid in sorted(found, key=lambda pid: pid == driver):  # the driver last: it removes the logs
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if pid == driver else signal.SIGABRT)
        time.sleep(2)
        logs = [path for folder in Path("/tmp").glob(f"gl-{driver}-*") for path in folder.glob("r/session_2*/logs/*.*")]
        told = [f"{pid}: {line[:150]}" for pid, line in found.items()]
        told += [
            f"--- {path.name}\n{path.read_text(errors='replace')[-10_000:]}" for path in logs if path.stat().st_size
        ]
        os.kill(driver, signal.SIGABRT)
        os.kill(driver, signal.SIGCONT)
        time.sleep(2)
        return "\n".join(told)

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl so far."""
        path = self.folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    @contextmanager
    def watched(self) -> Iterator[tuple[set[str], set[str]]]:
        """Within it, collects what this run's processes have in shared memory (not what is unlinked at once), and on
        which addresses they listen. Another program's are none of ours: /dev/shm as a whole belongs to the machine."""
        mapped: set[str] = set()
        addresses: set[str] = set()
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.3):
                for pid in self.processes():
                    mapped.update(_mapped(pid))
                    addresses.update(_listens(pid))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield mapped, addresses
        finally:
            over.set()
            thread.join()

    def processes(self) -> dict[int, str]:
        """Living processes that descend from this run: pid -> command line."""
        return marked(self.marker)


def metrics_page(folder: Path) -> str:
    """What Prometheus would read at the address in a run's folder; '' where there is none."""
    file = folder / "prometheus.json"
    if not file.exists():
        return ""
    ((address,),) = (group["targets"] for group in json.loads(file.read_text()))
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def _listens(pid: int) -> list[str]:
    try:
        sockets = psutil.Process(pid).net_connections("inet")
    except psutil.Error:  # it ended while we looked
        return []
    return [socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN]


def _mapped(pid: int) -> list[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return [line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line and "(deleted)" not in line]


def wait_until(true: Callable[[], bool], what: str, seconds: float = 120, process: Any = None) -> None:
    """Polls; fails with `what` after so many seconds, or at once when the process has ended."""
    deadline = time.monotonic() + seconds
    while not true():
        assert process is None or process.poll() is None, f"the run ended before: {what}\n{process.stdout.read()}"
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def ctrl_c(process: subprocess.Popen[str]) -> None:
    """What a terminal does: SIGINT to the whole process group."""
    os.killpg(process.pid, signal.SIGINT)
