"""What a new policy's way from the learner to the generators costs.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.push runs [--workloads demo] [--pushes adapter merged]
    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.push whole [--layers 12] [--shards 1]
    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.push fan_out [--megabytes 414] [--receivers 1 2 4 8]

runs     a policy's way in whole runs, by part, adapter and merged weights in turns: export (the learner builds what is
         sent), push (the call that brings it to the generator, with its transport), of it load (into vLLM, digest),
         probe (the generator scores the probe tokens, beside the first requests of the new policy), learner probe (the
         learner scores them, while the policy travels). Synchronous training waits for export and push, asynchronous
         for the export only.
whole    whole weights to a generator of the same machine: through a file in the learner's memory, and through Ray's
         object store, as they go to another machine. Real: a learner and a generator with vLLM, each a process of Ray
         with a core of its own; both ways in turns, each policy an optimizer step further. Memory is by how much the
         resident set of each role at its highest was above what it was before the push; pages that both have mapped
         count for both.
fan_out  a large adapter to several generators of one node, by reference (cluster.actor.stays_there). Real: Ray, its
         object store, an actor process that has the adapter and one for each receiver. Not there: the learner's
         building of the bytes, and vLLM's loading of the files. The very first push is cold: the object store's pages
         are not there yet.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import as_table, conditions, parser_of, save, spread, under
from benchmarks.system.system_run import (
    BOTH,
    PUSH,
    Mode,
    Record,
    Tree,
    about_ragged,
    add_ragged_options,
    demo_of_one,
    parts_of,
    ragged,
    run_gleaner,
    wall_text,
)
from cluster.actor import Actor, Shared, stays_there
from cluster.placement import Role
from cluster.ray_actor import Remote
from cluster.ray_cluster import Session, connect
from examples.random_model import make_tiny_model
from learner.config import RunConfig
from learner.driver.memory import settle
from learner.driver.roles import make_trainer, worker_spec
from learner.trainer.service import Exported, TrainerService
from rollout.data.chat import Chat
from rollout.fakes import make_group
from rollout.service import RolloutService
from rollout.types import Adapter
from rollout.vllm.convert import AdapterWindow
from rollout.vllm.environment import required_env
from rollout.weights import Source, pack
from rollout.worker import RolloutWorker

DEADLINE_S, REPEATS = 600.0, 5
MODES = {"sync": Mode(0, 1, 1), "async": Mode(1, 1, 1), "async, continue": Mode(1, 1, 1, "continue")}
WAYS = ("file", "object store")
REWARD = "def spread(prompts, completions, **columns):\n    return [float(i) for i in range(len(completions))]\n"


def turns(tree: Tree, options: argparse.Namespace) -> list[Record]:
    """Per seed and mode a run of each push, named for both."""
    records = []
    for seed in range(options.repeats):
        for mode in options.modes:
            for push in options.pushes:
                own = tree | {"seed": seed, "learner": tree["learner"] | {"push": push}}
                record = replace(run_gleaner(own, MODES[mode], options.limit), system=f"{mode}: {push}")
                print(f"{record.system}, {record.dtype}, seed {seed}: {record.rate(options.skip):.2f} samples/s,",
                      f"load before {record.load:.1f}", flush=True)  # fmt: skip
                records.append(record)
    return records


def runs_table(records: Sequence[Record], options: argparse.Namespace) -> str:
    """Rates, over those of the first push, and milliseconds of a step."""
    skip, rows = options.skip, []
    for dtype in dict.fromkeys(record.dtype for record in records):
        for mode in options.modes:
            first: list[Record] = []
            for push in options.pushes:
                own = [r for r in records if (r.dtype, r.system) == (dtype, f"{mode}: {push}")]
                first = first or own
                ratio = spread([a.rate(skip) / b.rate(skip) for a, b in zip(own, first, strict=True)])
                waits = PUSH[:2] if mode == "sync" else PUSH[:1]
                waited = [sum(r.mean(skip, name) for name in waits) / r.mean(skip, "seconds") for r in own]
                parts = parts_of(own, skip, ("seconds", "generate", "train", *PUSH), ".3f")
                rows.append([mode, push, dtype, spread([r.rate(skip) for r in own]), f"{ratio} x", *parts,
                             spread([100 * share for share in waited])])  # fmt: skip
    header = ["", "push", "type", "samples/s", "to the first push", "s per step", "generate", "train", "export",
              "push", "of it load", "probe", "learner probe", "training waits, % of a step"]  # fmt: skip
    return as_table(header, rows)


def runs(options: argparse.Namespace) -> None:
    told, found = conditions(BOTH), dict[str, list[Record]]()
    with tempfile.TemporaryDirectory() as folder:
        if "ragged" in options.workloads:
            tree = ragged(Path(folder), options)
            trees = [tree | {"model": tree["model"] | {"dtype": dtype}} for dtype in options.dtype]
            found["ragged"] = [record for own in trees for record in turns(own, options)]
        if "demo" in options.workloads:
            found["demo"] = turns(demo_of_one(options.demo_steps, every=0), options)
    every = [record for records in found.values() for record in records]
    tables = "".join(f"## {name}\n\n{runs_table(records, options)}\n\n" for name, records in found.items())
    text = (
        f"# A policy's way in whole runs\n\n{tables}"
        f"Median (least - most) of {options.repeats} runs, which took turns, a core for each role; steps after the "
        f"first {options.skip}. Generation goes on while a policy is proven by its probe; its groups enter the buffer "
        f"after that. ragged: {about_ragged(options)} {options.steps} steps. demo: `configs/local_cpu.yaml` with one "
        f"generator, {options.demo_steps} steps.\n\nConditions: {wall_text(told, every)}"
    )
    content = {name: [asdict(record) for record in records] for name, records in found.items()}
    save("push", {"conditions": told, "runs": content}, text)


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


async def pushed_whole(generator: Remote[Any], learner: Remote[Any], way: str, step: int) -> dict[str, float]:
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
        f"{name} bytes": _status(role.pid, "VmHWM") - before[name]
        for name, role in zip(before, (generator, learner), strict=True)
    }
    return {
        "export s": exported.seconds, "written s": written - began, "load s": receipt.load_s, "all s": ended - began,
        **grown,
    }  # fmt: skip


def _reset(pid: int | None) -> float:
    """The resident set now, from which on its peak is counted again (proc(5), clear_refs)."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return _status(pid, "VmRSS")


def _status(pid: int | None, name: str) -> float:
    rows = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return 1024.0 * int(rows[name].split()[0])


async def measure_whole(layers: int, repeats: int, shards: int) -> tuple[int, list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        config = configured(Path(folder), layers, shards)
        size = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors")) // 2  # float32 there
        session = connect("local", min_cpus=2, policy_bytes=size)
        try:
            generator, learner = await started(session, config)
            rows: list[dict[str, Any]] = []
            for turn in range(repeats + 1):
                for way in WAYS:
                    found = await pushed_whole(generator, learner, way, len(rows))
                    rows.append({"way": way, "first": turn == 0, **found})
                    print(rows[-1], flush=True)
            await generator.call(RolloutService.close, DEADLINE_S)
        finally:
            await session.close()
    return size, rows


def whole(options: argparse.Namespace) -> None:
    told = conditions()
    size, rows = asyncio.run(measure_whole(options.layers, options.repeats, options.shards))
    cells = []
    for way in WAYS:
        all_of_it = [row for row in rows if row["way"] == way]
        warm = [row for row in all_of_it if not row["first"]]
        seconds = [f"{median(row[f'{name} s'] for row in warm):.2f}" for name in ("export", "written", "load", "all")]
        peaks = [max(row[f"{name} bytes"] for row in all_of_it) for name in ("learner", "generator-0")]
        cells.append([way, *seconds, *(f"{peak / size:.1f}" for peak in peaks)])
    to = f", to a generator of {options.shards} processes" if options.shards > 1 else ""
    header = ["way", "export s", "written s", "load s", "all s", "learner, copies", "generator, copies"]
    text = (
        f"# A push of {size / 1e6:.0f} MB of whole weights within a machine{to}\n\n{as_table(header, cells)}\n\n"
        "export: the learner writes the weights and hashes them. written: until they can be read elsewhere. load: the "
        "generator hashes them and vLLM loads them. Seconds are medians without the first push of each way. Copies are "
        f"multiples of what is sent, by which a role's resident set peaked above what it was.\n\n"
        f"{under(told, 'Wall time')}"
    )
    name = "whole_push" if options.shards == 1 else f"whole_push_{options.shards}_shards"
    save(name, {"conditions": told, "bytes": size, "rows": rows}, text)


class Sender:
    """Has an adapter of so many bytes."""

    def __init__(self, size: int) -> None:
        import torch

        half = torch.from_numpy(np.random.default_rng(0).standard_normal(size // 8, dtype=np.float32)).reshape(8, -1)
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        self._payload = pack({name.format(side): Source.of(half) for side in "AB"}, torch.float32)
        self._version = -1

    @stays_there
    async def outgoing(self) -> tuple[Shared[Adapter], Exported]:
        """As TrainerService.outgoing, of the same bytes each time."""
        self._version += 1
        adapter = Adapter.build(self._version, self._payload, {"r": 8})
        return Shared(adapter), Exported(adapter.policy_id, 0.0)


class Receiver:
    """Takes adapters as a generator does, up to where vLLM would load them."""

    async def reached(self, adapter: Adapter) -> int:
        return len(adapter.payload)

    async def staged(self, adapter: Adapter) -> int:
        window = AdapterWindow(2)
        staged = window.stage(adapter)
        window.clear()
        assert staged.digest == adapter.digest
        return len(adapter.payload)


class Push(NamedTuple):
    """Seconds: until the sender has written it, from then on until all receivers have it, and of the driver's CPU."""

    written: float
    sent: float
    driver: float


async def pushed(sender: Actor[Any], receivers: Sequence[Actor[Any]], how: Callable[..., Any]) -> Push:
    cpu, began = time.process_time(), time.perf_counter()
    policy, _ = await sender.call(Sender.outgoing, DEADLINE_S)
    written = time.perf_counter()
    await asyncio.gather(*(one.call(how, DEADLINE_S, policy.argument()) for one in receivers))
    return Push(written - began, time.perf_counter() - written, time.process_time() - cpu)


async def measure_fan_out(size: int, counts: Sequence[int]) -> list[dict[str, Any]]:
    session = connect("local", min_cpus=1 + max(counts), policy_bytes=size)
    try:
        roles = [Role(name, 1, 0) for name in ("sender", *(f"receiver-{i}" for i in range(max(counts))))]
        await session.reserve(roles, DEADLINE_S)
        sender = session.spawn(roles[0], Sender, [size], {})
        receivers = [session.spawn(role, Receiver, [], {}) for role in roles[1:]]
        await asyncio.gather(*(one.ready(DEADLINE_S) for one in (sender, *receivers)))
        rows: list[dict[str, Any]] = []
        for how in (Receiver.reached, Receiver.staged):
            for count in counts:
                found = [await pushed(sender, receivers[:count], how) for _ in range(REPEATS + 1)]
                warm = Push(*map(median, zip(*found[1:], strict=True)))
                rows.append(
                    {"how": how.__name__, "receivers": count, "first": found[0]._asdict(), "warm": warm._asdict()}
                )
                print(rows[-1], flush=True)
        return rows
    finally:
        await session.close()


def fan_out(options: argparse.Namespace) -> None:
    told = conditions()
    rows = asyncio.run(measure_fan_out(int(1e6 * options.megabytes), options.receivers))
    cells = [
        [
            row["how"], str(row["receivers"]),
            *(f"{row[when][part]:.3f}" for part in ("written", "sent") for when in ("first", "warm")),
            f"{1e3 * row['warm']['driver']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    header = ["how far", "receivers", "written s, first", "warm", "sent s, first", "warm", "driver CPU-ms"]
    text = (
        f"# An adapter of {options.megabytes:g} MB to several generators of one node\n\n{as_table(header, cells)}\n\n"
        "written: digest, and once into the object store, by the sender. sent: from then on, to all. reached: the "
        "bytes are there to be read, none is copied. staged: each receiver has also written them as a file in PEFT's "
        "format and looked at that file's digest, as a generator does (rollout.vllm.convert), on the cores that "
        f"there are. warm: medians of {REPEATS} after a first.\n\n{under(told, 'Wall time')}"
    )
    save("fan_out", {"conditions": told, "rows": rows}, text)


def main() -> None:
    parser = parser_of(__doc__)
    what = parser.add_subparsers(dest="what", required=True)
    of_runs = what.add_parser("runs")
    add_ragged_options(of_runs)
    of_runs.add_argument("--workloads", nargs="+", choices=["demo", "ragged"], default=["demo", "ragged"])
    of_runs.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    of_runs.add_argument("--pushes", nargs="+", choices=["adapter", "merged"], default=["adapter", "merged"])
    of_runs.add_argument("--repeats", type=int, default=3, help="runs of each")
    of_runs.add_argument("--demo-steps", type=int, default=30)
    of_runs.add_argument("--limit", type=float, default=7200, help="seconds after which a run has failed")
    of_whole = what.add_parser("whole")
    of_whole.add_argument("--layers", type=int, default=12, help="of 1024 hidden units")
    of_whole.add_argument("--repeats", type=int, default=REPEATS)
    of_whole.add_argument("--shards", type=int, default=1, help="processes of the generator (tensor parallelism)")
    of_fan_out = what.add_parser("fan_out")
    of_fan_out.add_argument("--megabytes", type=float, default=414, help="10^6 bytes")
    of_fan_out.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4, 8], metavar="COUNT")
    options = parser.parse_args()
    {"runs": runs, "whole": whole, "fan_out": fan_out}[options.what](options)


if __name__ == "__main__":
    main()
