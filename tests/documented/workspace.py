"""A folder in which the documented commands find what a reader would have: the repository's files, runs, own files."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import yaml

from learner.tools.init import REWARD, ROWS
from tests.documented.blocks import ROOT, blocks
from tests.documented.harmless import check
from tests.flow.run import environment

MODEL = ROOT / "examples" / "tiny-arithmetic"
# What a small run has in the place of what the documents name; and of alternatives a reader takes one, or another name.
INSTEAD = {
    "arithmetic_pairs runs/pairs.jsonl": "arithmetic_pairs runs/pairs.jsonl --sums 800",
    "my.yaml --dry-run": "my.yaml --dry-run name=another",
    "--assume-gpus 2xh100": "--assume-gpus 2xh100 model.dtype=bfloat16 'cluster.gpus={generator: 0.5, learner: 0.5}'",
    "--step 12": "--step 2",
    "--step 40": "--step 4",
    "chain_sum-17": "{problem}",
}
# What commands make that stand beside each other in the documents.
MADE = {
    "gleaner export runs/demo-seed0 my-adapter": "my-adapter",
    "gleaner export runs/demo-seed0 my-model": "my-model",
    "gleaner init my-run": "my-run",
    "gleaner train --config my.yaml": "runs/my-run",
}
# gleaner doctor says by 1 that this machine lacks something.
CODES = {"gleaner doctor": (0, 1)}


class Workspace:
    """Runs commands one after the other, as one shell would: a `cd` holds for those that follow."""

    def __init__(self, folder: Path, run: Path | None = None, model: Path = MODEL, packages: Path = ROOT) -> None:
        """`run`: what stands as runs/demo-seed0, runs/demo-seed1 and runs/my-run. model: what stands for the model of
        the documents. packages: a folder with packages that commands may import, beside the repository."""
        self.folder, self._here, self._problem, self._packages = folder, folder, "", packages
        for name in ("benchmarks", "configs", "examples", "rollout"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "Qwen").mkdir()
        for name in ("Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct"):  # the models that the documents name
            (folder / "Qwen" / name).symlink_to(model)
        (folder / "my_rewards.py").write_text(REWARD)
        rows = "".join(json.dumps(row) + "\n" for row in ROWS)
        for name in ("train.jsonl", "test.jsonl", "data.jsonl"):
            (folder / name).write_text(rows)
        (folder / "said.jsonl").write_text('"<answer>42</answer>"\n["7", ""]\n')
        pairs = [{"prompt": f"{number} =", "chosen": str(number), "rejected": "no"} for number in range(20)]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
        (folder / "my.yaml").write_text(_small(next(blocks("yaml")).text))
        if run is not None:
            for name in ("demo-seed0", "demo-seed1", "my-run"):
                shutil.copytree(run, folder / "runs" / name)
            self._problem = _a_problem(run)

    def run(self, command: str) -> str:
        """Runs it; '' if it ended well, else what it said. Raises Refused for what must never run here."""
        check(command)
        for documented, here in INSTEAD.items():
            command = command.replace(documented, here.replace("{problem}", self._problem))
        for start, made in MADE.items():
            if command.startswith(start) and "--dry-run" not in command:
                shutil.rmtree(self.folder / made, ignore_errors=True)
        if command.startswith("cd "):
            self._here /= command.removeprefix("cd ")
            return ""
        words = ["bash", "-o", "pipefail", "-c", command]
        env = self._environment()
        ran = subprocess.run(words, cwd=self._here, env=env, capture_output=True, text=True, timeout=500)
        ended_well = ran.returncode in CODES.get(command, (0,))
        return "" if ended_well else f"{command}: exit code {ran.returncode}\n{ran.stdout}{ran.stderr}"

    def _environment(self) -> dict[str, str]:
        """With a `gleaner` and a `python` of these sources."""
        programs = self.folder / ".bin"
        programs.mkdir(exist_ok=True)
        start = "from gleaner.__main__ import console; console()"
        for name, arguments in {"gleaner": f"-P -c '{start}'", "python": ""}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            (programs / name).chmod(0o755)
        path = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{self._packages}", "NO_COLOR": "1"}
        return environment(f"gleaner-test-{uuid.uuid4().hex}") | path


def _small(text: str) -> str:
    """The README's configuration with two steps of short completions, on the CPU."""
    config = yaml.safe_load(text)
    config.pop("cluster", None)
    config |= {"steps": 2, "model": config["model"] | {"dtype": "float32"}}
    config["rollout"] |= {"max_completion_length": 24, "kv_cache": "32MiB"}
    config["learner"]["groups_per_step"] = 2
    return yaml.safe_dump(config)


def _a_problem(run: Path) -> str:
    import pyarrow.parquet as pq

    newest = max((run / "rollouts").glob("*.parquet"))
    found: str = pq.read_table(newest, columns=["problem_id"])["problem_id"][0].as_py()
    return found
