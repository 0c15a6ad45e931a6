"""What it costs to hand a group over: through the Buffer inside the driver, and from a Ray actor into it.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.pipes [--groups 400]

buffer  admit, put, take and release of groups of rollout.schema, a batch of eight at a time: the Buffer alone.
actor   the same groups as answers of a Ray actor, eight calls under way at once, as rollout workers are called
        (cluster.ray_actor): what the driver gets is a pa.Table by value. CPU is the driver's own, all its threads.
push    the other way: an adapter as one argument that eight calls share, as producers send it to their generators.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import ENGINE_PACKAGES, MIB, as_table, conditions, save, under
from cluster.actor import Actor, Shared
from cluster.buffer import Buffer
from cluster.placement import Role
from cluster.ray_cluster import connect
from rollout.fakes import make_group
from rollout.types import Adapter, Completion

GENERATIONS, AT_ONCE, DEADLINE_S = 8, 8, 120.0
LENGTHS = {"short": 200, "long": 4096}  # tokens of a completion
ADAPTERS = {"1 MiB": MIB, "40 MiB": 40 * MIB}  # 10 million weights in float32: r = 16 on a model of 1B


def group_of(tokens: int) -> pa.Table:
    ids, logprobs = np.arange(tokens, dtype=np.int32), np.linspace(-9, 0, tokens, dtype=np.float32)
    versions = np.zeros(tokens, np.int32)
    completions = [Completion(ids, logprobs, "length", versions) for _ in range(GENERATIONS)]
    return make_group(completions=completions, rewards=[1.0] * GENERATIONS)


class Source:
    """Stands for a rollout worker that has its group ready."""

    def __init__(self) -> None:
        self._groups = {name: group_of(tokens) for name, tokens in LENGTHS.items()}

    async def group(self, name: str) -> pa.Table:
        return self._groups[name]

    async def take(self, adapter: Adapter) -> int:
        return len(adapter.payload)


def row(what: str, groups: int, size: int, wall: float, cpu: float) -> dict[str, Any]:
    found = {
        "what": what, "count": groups, "bytes": size, "ms": 1e3 * wall / groups, "cpu_ms": 1e3 * cpu / groups,
        "mb_per_s": groups * size / wall / 1e6,
    }  # fmt: skip
    print(found, flush=True)
    return found


async def timed(work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """(wall, CPU) seconds of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    await work()
    return time.perf_counter() - wall, time.process_time() - cpu


async def through_buffer(name: str, groups: int) -> dict[str, Any]:
    group = group_of(LENGTHS[name])
    buffer = Buffer(AT_ONCE, 0, 2**30, on_drop=lambda _: None)

    async def work() -> None:
        for _ in range(groups // AT_ONCE):
            for _ in range(AT_ONCE):
                await buffer.put(await buffer.admit(), group)
            await buffer.take(AT_ONCE, 0)
            buffer.release(AT_ONCE)

    return row(f"buffer, {name}", groups, group.nbytes, *await timed(work))


async def through_actor(name: str, groups: int, source: Actor[Source]) -> dict[str, Any]:
    async def lane() -> None:
        for _ in range(groups // AT_ONCE):
            await source.call(Source.group, DEADLINE_S, name)

    async def work() -> None:
        await asyncio.gather(*(lane() for _ in range(AT_ONCE)))

    await work()  # once without a clock
    return row(f"actor, {name}", groups, group_of(LENGTHS[name]).nbytes, *await timed(work))


async def pushed(name: str, times: int, source: Actor[Source]) -> dict[str, Any]:
    adapter = Adapter.build(0, bytes(ADAPTERS[name]), {})

    async def work() -> None:
        for _ in range(times):
            shared = Shared(adapter)
            await asyncio.gather(*(source.call(Source.take, DEADLINE_S, shared.argument()) for _ in range(AT_ONCE)))

    await work()
    return row(f"push, {name}", times, ADAPTERS[name], *await timed(work))


async def measure(groups: int) -> list[dict[str, Any]]:
    rows = [await through_buffer(name, groups) for name in LENGTHS]
    session = connect("local", min_cpus=1)
    try:
        role = Role("source", 1, 0)
        await session.reserve([role], DEADLINE_S)
        source = session.spawn(role, Source, [], {})
        await source.ready(DEADLINE_S)
        rows += [await through_actor(name, groups, source) for name in LENGTHS]
        rows += [await pushed(name, max(2, groups // 40), source) for name in ADAPTERS]
    finally:
        await session.close()
    return rows


def report(rows: list[dict[str, Any]], told: dict[str, Any]) -> str:
    cells = [
        [
            found["what"],
            f"{found['bytes'] / 1e3:.0f}",
            f"{found['ms']:.3f}",
            f"{found['cpu_ms']:.3f}",
            "-" if found["what"].startswith("push") else f"{1e3 * GENERATIONS / found['ms']:.0f}",
            f"{found['mb_per_s']:.0f}",
        ]
        for found in rows
    ]
    header = ["way", "kB each", "ms each", "driver CPU-ms each", "rows/s", "MB/s"]
    return (
        f"# Handing over: groups of {GENERATIONS} completions of {LENGTHS['short']} or {LENGTHS['long']} tokens, and "
        f"adapters\n\n{as_table(header, cells)}\n\n"
        "The Buffer moves references, so its MB/s say only that size costs nothing there. An actor's group is "
        f"serialised there and read here; {AT_ONCE} calls under way. A push is the round trip of one adapter "
        f"that {AT_ONCE} calls share, as those to generators do.\n\n"
        f"Conditions: {under(told, 'Wall and CPU time')}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=800, help="of each kind, a multiple of 8")
    options = parser.parse_args()
    told = conditions(ENGINE_PACKAGES)
    rows = asyncio.run(measure(options.groups))
    save("pipes", {"conditions": told, "rows": rows}, report(rows, told))


if __name__ == "__main__":
    main()
