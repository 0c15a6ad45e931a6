"""Whole weights to a generator of the same machine: through a file in the learner's memory, and through Ray's object
store, as they go to another machine.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.whole_push [--layers 12] [--repeats 5] [--shards 1]

Real: a learner (learner.mode: full) and a generator with vLLM, each a process of Ray with a core of its own; both ways
in turns, each policy an optimizer step further. Memory is by how much the resident set of each role at its highest was
above what it was before the push; pages that both have mapped count for both.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from cluster.placement import Role
from cluster.ray_actor import Remote
from cluster.ray_cluster import Session, connect
from examples.random_model import make_tiny_model
from learner.config import RunConfig
from learner.driver.memory import settle
from learner.driver.roles import make_trainer, worker_spec
from learner.trainer.service import TrainerService
from rollout.data.chat import Chat
from rollout.fakes import make_group
from rollout.service import RolloutService
from rollout.vllm.environment import required_env
from rollout.worker import RolloutWorker

DEADLINE_S = 600.0
WAYS = ("file", "object store")
REWARD = "def spread(prompts, completions, **columns):\n    return [float(i) for i in range(len(completions))]\n"


def configured(folder: Path, layers: int, shards: int) -> RunConfig:
    (folder / "rewards.py").write_text(REWARD)
    (folder / "data.jsonl").write_text('{"question": "say something"}\n')
    model = make_tiny_model(folder / "model", hidden_size=1024, layers=layers, heads=16, kv_heads=4)
    return RunConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": "bfloat16"},
            "data": {"path": str(folder / "data.jsonl"), "eval": {"every": 0}},
            "rewards": [{"use": f"{folder}/rewards.py:spread"}],
            "rollout": {"num_generations": 4, "max_completion_length": 16, "kv_cache": "32MiB"},
            "learner": {"mode": "full", "learning_rate": 1e-5, "groups_per_step": 1},
            "cluster": {"tensor_parallel": shards},
        }
    )


async def started(session: Session, config: RunConfig) -> tuple[Remote[RolloutWorker], Remote[Any]]:
    roles = [Role("generator-0", 1, 0), Role("learner", 1, 0)]
    await session.reserve(roles, DEADLINE_S)
    budgets = settle(config, Chat.load(config.model.path).config)
    env = required_env(cuda=False)
    generator = session.spawn(roles[0], RolloutWorker, [worker_spec(config, 0, budgets)], env)
    learner = session.spawn(roles[1], make_trainer, [config, 1000, None], env)
    await asyncio.gather(generator.ready(DEADLINE_S), learner.ready(DEADLINE_S))
    return generator, learner


async def pushed(generator: Remote[RolloutWorker], learner: Remote[Any], way: str, step: int) -> dict[str, float]:
    await learner.call(TrainerService.step, DEADLINE_S, [make_group(step)])
    before = {role.name: _reset(role.pid) for role in (generator, learner)}
    began = time.perf_counter()
    policy, exported = await learner.call(TrainerService.outgoing, DEADLINE_S, way == "file")
    written = time.perf_counter()
    receipt = await generator.call(RolloutService.take_policy, DEADLINE_S, policy.argument())
    ended = time.perf_counter()
    assert receipt is not None
    assert receipt.digest == exported.policy_id.digest
    grown = {
        f"{name} bytes": _peak(role.pid) - before[name] for name, role in zip(before, (generator, learner), strict=True)
    }
    return {
        "export s": exported.seconds, "written s": written - began, "load s": receipt.load_s, "all s": ended - began,
        **grown,
    }  # fmt: skip


def _reset(pid: int | None) -> float:
    """The resident set now, from which on its peak is counted again (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status(pid, "VmRSS")


def _peak(pid: int | None) -> float:
    return _status(pid, "VmHWM")


def _status(pid: int | None, name: str) -> float:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024.0 * int(rows[name].split()[0])


async def measure(layers: int, repeats: int, shards: int) -> tuple[int, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        config = configured(Path(folder), layers, shards)
        size = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors")) // 2  # float32 there
        session = connect("local", min_cpus=2, policy_bytes=size)
        try:
            generator, learner = await started(session, config)
            rows: list[dict[str, Any]] = []
            for turn in range(repeats + 1):
                for way in WAYS:
                    found = await pushed(generator, learner, way, len(rows))
                    rows.append({"way": way, "first": turn == 0, **found})
                    print(rows[-1], flush=True)
            await generator.call(RolloutService.close, DEADLINE_S)
        finally:
            await session.close()
    return size, rows


def report(size: int, rows: Sequence[dict[str, Any]], told: dict[str, Any], shards: int) -> str:
    cells = []
    for way in WAYS:
        all_of_it = [row for row in rows if row["way"] == way]
        warm = [row for row in all_of_it if not row["first"]]
        seconds = [f"{median(row[f'{name} s'] for row in warm):.2f}" for name in ("export", "written", "load", "all")]
        peaks = [max(row[f"{name} bytes"] for row in all_of_it) for name in ("learner", "generator-0")]
        cells.append([way, *seconds, *(f"{peak / size:.1f}" for peak in peaks)])
    spread = f", to a generator of {shards} processes" if shards > 1 else ""
    header = ["way", "export s", "written s", "load s", "all s", "learner, copies", "generator, copies"]
    return (
        f"# A push of {size / 1e6:.0f} MB of whole weights within a machine{spread}\n\n{as_table(header, cells)}\n\n"
        "export: the learner writes the weights and hashes them. written: until they can be read elsewhere. load: the "
        "generator hashes them and vLLM loads them. Seconds are medians without the first push of each way. Copies are "
        "multiples of what is sent, by which a role's resident set peaked above what it was.\n\n"
        f"{under(told, 'Wall time')}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="of 1024 hidden units")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shards", type=int, default=1, help="processes of the generator (tensor parallelism)")
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    size, rows = asyncio.run(measure(options.layers, options.repeats, options.shards))
    name = "whole_push" if options.shards == 1 else f"whole_push_{options.shards}_shards"
    save(name, {"conditions": told, "bytes": size, "rows": rows}, report(size, rows, told, options.shards))


if __name__ == "__main__":
    main()
