"""Stands in for verifiers 0.4 where our border with it is tested: as much of it as our child process touches, and tasks
that behave as episodes do. All its modules are this one."""

import asyncio
import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

for name in ("clients", "configs", "configs.client", "utils", "utils.loaders"):
    sys.modules[f"verifiers.v1.{name}"] = sys.modules[__name__]

TrainClientConfig = ModelContext = SamplingConfig = SimpleNamespace
HOWS = ("plays", "fails", "dies", "hangs")


class Env:
    def __init__(self, config: Any) -> None:
        self.taskset = [SimpleNamespace(how=how, data=SimpleNamespace(prompt_text=f"It {how}.")) for how in HOWS]
        self.config = config

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    def slots(self, task: Any) -> list[Any]:
        return [task]

    async def run_slot(self, slot: Any, context: Any) -> Any:
        first = self._ask(context, [5, 6, 7])
        print("a word of its own")
        if slot.how == "fails":
            error = SimpleNamespace(type="ToolError", message="no such tool")
            return SimpleNamespace(errors=[error], traces=[])
        if slot.how == "dies":
            sys.exit("the server did not start")
        if slot.how == "hangs":  # with a server of its own session
            server = subprocess.Popen(["sleep", "600"], start_new_session=True)
            Path(self.config["pid"]).write_text(str(server.pid))
            await asyncio.sleep(600)
        second = self._ask(context, [5, 6, 7, *first, 8, 9])
        rewards = {
            "said": SimpleNamespace(score=float(len(first + second)), weight=0.5),
            "style": None,
        }
        return SimpleNamespace(errors=[], traces=[SimpleNamespace(errors=[], rewards=rewards)])

    def _ask(self, context: Any, token_ids: list[int]) -> list[int]:
        url = context.client.base_url.removesuffix("/v1") + "/inference/v1/generate"
        sampling = {
            "max_tokens": context.sampling.max_tokens,
            "stop_token_ids": [2],
            "logprobs": 1,
            "skip_special_tokens": False,
            "routed_experts_prompt_start": len(token_ids),
        }
        body = {"token_ids": token_ids, "sampling_params": sampling}
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return list(json.load(answer)["choices"][0]["token_ids"])


def resolve_env_config(config: Any) -> Any:
    return config


def load_environment(config: Any) -> Env:
    return Env(config)
