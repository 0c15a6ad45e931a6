"""Environments of verifiers 0.4, unchanged, as programs. verifiers wants other versions of shared packages than we do,
so it lives in a virtual environment of its own, and each episode in a process of that."""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.env.adapters.token_server import token_server
from rollout.env.program import Model
from rollout.schema import Problem

CHILD = Path(__file__).with_name("verifiers_child.py")
# Called with -P: beside the child lies a file of ours that is called as the package it imports.
SHOWN = 500  # characters of what a child said before it died


class VerifiersFailed(RuntimeError):
    """An episode that verifiers itself calls failed, or whose process died."""


class Verifiers:
    """One episode. The column `task` of the problem is the index of the task in the environment's taskset;
    `verifiers_child.py tasks` writes such data.

    python: the interpreter of the virtual environment in which verifiers and the environment's package are installed.
    environment: the environment's configuration as verifiers has it (verifiers/v1/configs/env.py). Where it names no
        runtime, verifiers takes a paid remote one: say {"agent": {"runtime": {"type": "subprocess"}}}.
    model: folder of the model, whose tokenizer verifiers' renderer uses.
    renderer: the renderer's configuration, such as {"name": "qwen3"}; it must write what the model's chat template
        writes, and must extend a conversation without changing what was sampled: else trajectories end as `branched`.
    max_tokens: of one turn.

    Raises ValueError where python or model is missing.
    """

    def __init__(
        self,
        python: str,
        environment: Mapping[str, Any],
        model: str,
        renderer: Mapping[str, Any],
        max_tokens: int = 1024,
    ) -> None:
        for name, path in (("python", python), ("model", model)):
            if not Path(path).exists():
                raise ValueError(f"env.args.{name}: must be a path that exists, got {path}")
        self._python = python
        self._request = {
            "environment": dict(environment),
            "model": str(Path(model).resolve()),
            "renderer": dict(renderer),
            "max_tokens": max_tokens,
        }

    async def run(self, problem: Problem, seed: int, model: Model) -> Mapping[str, float]:
        """verifiers' rewards by name, their weights applied. Raises VerifiersFailed with its words."""
        async with token_server(model) as url:
            request = self._request | {"url": url, "task": problem.columns["task"]}
            process = await asyncio.create_subprocess_exec(
                self._python, "-P", str(CHILD), "episode", env=_environment(self._python),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                start_new_session=True,  # killed with us it could end none of its own; it ends them when we have ended
            )  # fmt: skip
            out, err = await process.communicate(json.dumps(request).encode())
        if process.returncode != 0:
            last = " ".join(err.decode(errors="replace").split())[-SHOWN:]
            raise VerifiersFailed(f"its process ended with exit code {process.returncode}: {last}")
        answer = json.loads(out.decode().splitlines()[-1])
        if answer["error"]:
            raise VerifiersFailed(answer["error"])
        rewards: dict[str, float] = answer["rewards"]
        return rewards


def _environment(python: str) -> dict[str, str]:
    """Ours, with the programs of the virtual environment (uv) first, and without our Python's modules."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"PATH": f"{Path(python).absolute().parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
