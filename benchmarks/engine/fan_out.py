"""A large adapter from the learner to 1, 2, 4 and 8 generators of one node, by reference (cluster.actor.stays_there).

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.fan_out [--megabytes 414] [--receivers 1 2 4 8]

Real: Ray, its object store, an actor process that has the adapter and one for each receiver, the calls of WeightSync
and PolicyFeed. Not there: the learner's building of the bytes, and vLLM's loading of the files.

reached  each receiver has the adapter, whose bytes lie where the sender wrote them once: what sending costs
staged   each has also written it as a file in PEFT's format and looked at that file's digest, as a generator does
         (rollout.vllm.convert): a copy and a pass of sha256, by each receiver's own core

The very first push is cold: the object store's pages are not there yet.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import ENGINE_PACKAGES, as_table, conditions, save, under
from cluster.actor import Actor, Shared, stays_there
from cluster.placement import Role
from cluster.ray_cluster import connect
from learner.trainer.service import Exported
from rollout.types import Adapter
from rollout.vllm.convert import AdapterWindow
from rollout.weights import Source, pack

DEADLINE_S, REPEATS = 300.0, 5


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


async def measure(size: int, counts: Sequence[int]) -> list[dict[str, Any]]:
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


def report(rows: Sequence[dict[str, Any]], megabytes: float, told: dict[str, Any]) -> str:
    cells = [
        [
            row["how"], str(row["receivers"]),
            *(f"{row[when][part]:.3f}" for part in ("written", "sent") for when in ("first", "warm")),
            f"{1e3 * row['warm']['driver']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    header = ["how far", "receivers", "written s, first", "warm", "sent s, first", "warm", "driver CPU-ms"]
    return (
        f"# An adapter of {megabytes:g} MB to several generators of one node\n\n{as_table(header, cells)}\n\n"
        "written: digest, and once into the object store, by the sender. sent: from then on, to all. reached: the "
        "bytes are there to be read, none is copied. staged: file and digest of the file, by each receiver, "
        f"on the cores that there are. warm: medians of {REPEATS} after a first.\n\n{under(told, 'Wall time')}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=414, help="10^6 bytes")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4, 8], metavar="COUNT", help="with 1")
    options = parser.parse_args()
    if 1 not in options.receivers:
        parser.error(f"--receivers: must have 1 among them, to compare with, got {options.receivers}")
    told = conditions(ENGINE_PACKAGES)
    rows = asyncio.run(measure(int(1e6 * options.megabytes), options.receivers))
    save("fan_out", {"conditions": told, "rows": rows}, report(rows, options.megabytes, told))


if __name__ == "__main__":
    main()
