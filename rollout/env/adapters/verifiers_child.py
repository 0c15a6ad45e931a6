"""Episodes of a verifiers 0.4 environment, run by a Python that has verifiers; this file alone is given to it.

    python -P verifiers_child.py tasks ENVIRONMENT.json     # one JSON line {"prompt", "task"} for each task, as data
    python -P verifiers_child.py episode < request.json     # the last line is JSON: {"rewards": ..., "error": ...}

ENVIRONMENT.json holds what verifiers calls the environment's configuration (verifiers/v1/configs/env.py), such as
{"taskset": {"id": "glossary"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def tasks(environment: dict[str, Any]) -> None:
    """Prints the tasks."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    for index, task in enumerate(load_environment(resolve_env_config(environment)).taskset):
        print(json.dumps({"prompt": task.data.prompt_text, "task": index}))


async def episode(request: dict[str, Any]) -> dict[str, Any]:
    """Plays one task against the token endpoint -> its rewards by name, and what went wrong ('' if nothing)."""
    import verifiers.v1 as vf
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    env = load_environment(resolve_env_config(request["environment"]))
    task = list(env.taskset)[request["task"]]
    client = TrainClientConfig(
        base_url=f"{request['url']}/v1",
        api_key_var="GLEANER_NO_KEY",
        renderer=request["renderer"],
        renderer_model_name=request["model"],
    )
    context = ModelContext(model="policy", client=client, sampling=vf.SamplingConfig(max_tokens=request["max_tokens"]))
    async with env.serving():
        (slot,) = env.slots(task)
        played = await env.run_slot(slot, context)
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    rewards: dict[str, float] = {}
    for trace in played.traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                rewards[name] = rewards.get(name, 0.0) + reward.score * reward.weight
    return {"rewards": rewards, "error": "; ".join(f"{error.type}: {error.message}"[:300] for error in errors)}


def leave_nothing_behind() -> None:
    """From here on this process ends with the one that started it, and when it is told to (SIGTERM), and everything
    that was started for the episode ends with it. verifiers gives harnesses and tool servers sessions of their own:
    no signal to our group reaches them, and it ends them only where it comes to its own end."""
    kernel = ctypes.CDLL(None)
    kernel.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    kernel.prctl(PR_SET_CHILD_SUBREAPER, 1)  # who loses its parent becomes our child
    signal.signal(signal.SIGTERM, _end)


def _end(*_: object) -> None:
    end_children()
    os._exit(128 + signal.SIGTERM)


def end_children() -> None:
    """Kills every process that descends from this one."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                yield int(stat.parent.name)


if __name__ == "__main__":
    if sys.argv[1] == "tasks":
        tasks(json.loads(Path(sys.argv[2]).read_text()))
    else:
        leave_nothing_behind()
        try:
            answer = json.dumps(asyncio.run(episode(json.load(sys.stdin))))
        finally:
            end_children()
        print("\n" + answer)  # last: nobody is left who could print a line after it, which would count
