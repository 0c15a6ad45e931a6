"""Trajectories whose environments take their time: is the engine kept busy, and is any trajectory lost?

    PYTHONPATH=. .venv/bin/python -m benchmarks.system.env_concurrency [--trajectories 64] [--seconds 2] [--groups 16]

One rollout worker in this process, with a real vLLM and a random Llama of 25M parameters, plays groups of 8, 64
trajectories at once. Their environments take 0 to 2 s a turn, and one in 16 hangs, dies or floods at its second turn.
The engine has work to do while a request for a turn is unanswered; it is idle in that time when it is in no step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from benchmarks.system.ragged_model import make_model
from cluster.telemetry import Interval, overlap
from rollout.engine import EngineSettings
from rollout.env.config import EnvConfig
from rollout.env.play import Limits
from rollout.env.rollouts import EnvSettings
from rollout.schema import Problem
from rollout.types import Completion, Sampling
from rollout.vllm.environment import required_env

ENVIRONMENT = f"{Path(__file__).with_name('waiting_environment.py')}:Waiting"
TEMPLATE = (
    "{% for m in messages %}{{ '<|user|> ' if m['role'] == 'user' else '<|assistant|> ' }}{{ m['content'] }}"
    "{{ ' ' if m['role'] == 'user' else ' <|end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
G, TURNS, STEP_TIMEOUT_S, LENGTH = 8, 4, 5.0, 512


class Watch:
    """When requests were unanswered, and when the engine was in a step; seconds of time.perf_counter."""

    def __init__(self, engine: Any) -> None:
        self.waiting: list[Interval] = []
        self.stepping: list[Interval] = []
        turns = engine._thread._turns
        engine.generate = self._timed(engine.generate)
        step = turns.turn

        def timed_step() -> None:
            begun = time.perf_counter()
            step()
            self.stepping.append((begun, time.perf_counter()))

        turns.turn = timed_step

    def _timed(self, generate: Callable[..., Awaitable[list[Completion]]]) -> Callable[..., Any]:
        async def timed(token_ids: Sequence[int], sampling: Sampling) -> list[Completion]:
            begun = time.perf_counter()
            try:
                return await generate(token_ids, sampling)
            finally:
                self.waiting.append((begun, time.perf_counter()))

        return timed

    def idle(self) -> tuple[float, float]:
        """(seconds in which the engine had work, share of them in which it was in no step)."""
        work = merged(self.waiting)
        seconds = sum(stop - start for start, stop in work)
        return seconds, 1 - overlap(work, merged(self.stepping)) / seconds


def merged(spans: list[Interval]) -> list[Interval]:
    """The same seconds, none twice."""
    found: list[Interval] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def make_worker(folder: Path, options: argparse.Namespace) -> Any:
    os.environ.update(required_env(cuda=False))
    from rollout.worker import RolloutWorker, WorkerSpec, vllm_engine

    make_model(folder, end_rate=0.03, context=1024)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = EngineSettings(
        model=str(folder), dtype="float32", max_model_len=600, kv_cache_bytes=512 << 20,
        max_num_seqs=options.trajectories, max_lora_rank=0, adapter_window=2, seed=0,
    )  # fmt: skip
    args = {"seconds": options.seconds, "turns": TURNS, "every": options.every}
    env = EnvConfig(use=ENVIRONMENT, args=args, step_timeout_s=STEP_TIMEOUT_S)
    played = EnvSettings(env, Limits(64, LENGTH, TURNS, 300), options.trajectories, 0)
    return RolloutWorker(WorkerSpec(0, "run", settings, (), 1, 2**30, vllm_engine, played))


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    worker = make_worker(folder, options)
    await worker.take_policy(policy_of(folder))

    def problem(position: int) -> Problem:
        question = " ".join(f"w{position * 7 + i}" for i in range(16))
        return Problem(f"p{position}", question, {"question": question}, (2,), position, 0)

    sampling = Sampling(n=G, max_tokens=LENGTH, seed=5)
    await worker.rollout(problem(10**6), sampling, 0)  # starts the server that environments are forked from
    watch, begun = Watch(worker.engine), time.perf_counter()
    tables = await asyncio.gather(*(worker.rollout(problem(i), sampling, 0) for i in range(options.groups)))
    wall = time.perf_counter() - begun
    await worker.close()
    outcomes = Counter(name for table in tables for name in table.column("finish_reason").to_pylist())
    work, idle = watch.idle()
    turns = sum(len(row) for table in tables for row in table.column("turns").to_pylist())
    waited = sum(turn["env_ms"] for table in tables for row in table.column("turns").to_pylist() for turn in row) / 1e3
    return {
        "asked": options.groups * G, "came back": sum(outcomes.values()), "outcomes": dict(outcomes), "turns": turns,
        "wall": wall, "with work": work, "idle": idle, "environments waited": waited,
    }  # fmt: skip


def policy_of(folder: Path) -> Any:
    """The model's own weights, pushed once, since an engine has no policy before."""
    from rollout.types import Weights

    return Weights.build(0, (folder / "model.safetensors").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=64, help="at once")
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0, help="most that an environment takes for a turn")
    parser.add_argument("--every", type=int, default=16, help="one trajectory in so many goes wrong; 0: none")
    logging.basicConfig(level=logging.WARNING)
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder), options))
    outcomes = ", ".join(f"{name} {count}" for name, count in sorted(found["outcomes"].items()))
    rows = [
        ["trajectories asked for, and come back", f"{found['asked']}, {found['came back']}"],
        ["how they ended", outcomes],
        ["turns", str(found["turns"])],
        ["seconds in all; of them with work for the engine", f"{found['wall']:.1f}; {found['with work']:.1f}"],
        ["share of those in which the engine was in no step", f"{found['idle']:.1%}"],
        ["seconds that environments took, summed", f"{found['environments waited']:.0f}"],
    ]
    measured = f"{options.trajectories} at once, environments of 0 to {options.seconds:g} s a turn; wall time"
    save(
        "env_concurrency",
        {"conditions": told, "found": found},
        f"{as_table(['', ''], rows)}\n\n{under(told, measured)}",
    )


if __name__ == "__main__":
    main()
