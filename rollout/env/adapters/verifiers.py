"""Environments of verifiers 0.4, unchanged, as programs. verifiers wants other versions of shared packages than we do,
so it lives in a virtual environment of its own, and each episode in a process of that.
"""

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from rollout.env.protocol import Model, OutOfBudget, Sampled
from rollout.schema import Problem

# The policy over HTTP on loopback, for a program that lives in another process: vLLM's POST /inference/v1/generate, as
# far as clients that keep tokens use it (verifiers 0.4: verifiers/v1/clients/train.py and renderers/client.py).

MOST_BYTES = 64 * 2**20  # of a request
TAKEN = ("max_tokens", "stop_token_ids", "logprobs", "skip_special_tokens", "routed_experts_prompt_start")
"""What a request may say: how many tokens; and what clients always send, which the run decides or never needs."""
NEUTRAL: dict[str, tuple[Any, ...]] = {  # these change nothing, and some clients send them
    "n": (None, 1),
    "top_p": (None, 1, 1.0),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "stop": (None, []),
    "presence_penalty": (None, 0, 0.0),
    "frequency_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "ignore_eos": (None, False),
}


@contextlib.asynccontextmanager
async def token_server(model: Model) -> AsyncIterator[str]:
    """Serves the policy on a free port of 127.0.0.1 -> its address, "http://127.0.0.1:PORT/KEY". The key is new each
    time: without it other users of the machine are answered with status 404."""
    key = secrets.token_urlsafe()

    async def generate(request: web.Request) -> web.Response:
        return await _generate(model, await request.json())

    application = web.Application(client_max_size=MOST_BYTES)
    application.router.add_post(f"/{key}/inference/v1/generate", generate)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/{key}"
    finally:
        await runner.cleanup()


async def _generate(model: Model, body: Mapping[str, Any]) -> web.Response:
    sampling = body.get("sampling_params") or {}
    own = [name for name in sampling if name not in TAKEN and sampling[name] not in NEUTRAL.get(name, (None,))]
    if own:
        return _error(f"{', '.join(own)}: sampling is the run's own (rollout.*); leave it out of the request")
    try:
        sampled = await model.generate(body["token_ids"], sampling.get("max_tokens"))
    except OutOfBudget:  # a status of failure would be the program's failure to its library, and cost it its reward
        sampled = Sampled([], [], "length")
    return web.json_response({"request_id": "", "choices": [_choice(sampled)]})


def _choice(sampled: Sampled) -> dict[str, Any]:
    content = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(sampled.token_ids, sampled.logprobs, strict=True)
    ]
    return {
        "index": 0,
        "token_ids": sampled.token_ids,
        "finish_reason": sampled.finish_reason,
        "logprobs": {"content": content},
    }


def _error(sentence: str) -> web.Response:
    """Status 400, which clients do not try again."""
    return web.json_response({"error": {"message": sentence, "type": "BadRequestError", "code": 400}}, status=400)


CHILD = Path(__file__).with_name("verifiers_child.py")
# Called with -P: beside the child lies a file of ours that is called as the package it imports.
SHOWN = 500  # characters of what a child said before it died


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
        """verifiers' rewards by name, their weights applied. Raises RuntimeError with its words for an
        episode that it calls failed, or whose process died."""
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
            raise RuntimeError(f"its process ended with exit code {process.returncode}: {last}")
        answer = json.loads(out.decode().splitlines()[-1])
        if answer["error"]:
            raise RuntimeError(answer["error"])
        rewards: dict[str, float] = answer["rewards"]
        return rewards


def _environment(python: str) -> dict[str, str]:
    """Ours, with the programs of the virtual environment (uv) first, and without our Python's modules."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"PATH": f"{Path(python).absolute().parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
