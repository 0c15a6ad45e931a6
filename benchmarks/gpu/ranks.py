"""Several ranks of the learner on one card, by NCCL: equal gradients, memory of a rank, and the loss of one in a step.

    PYTHONPATH=. python -m benchmarks.gpu.ranks                      all rows, some minutes
    PYTHONPATH=. python -m benchmarks.gpu.ranks --device cpu --tiny  the rehearsal, with gloo

NCCL takes no two ranks on one card of one node, so each rank names a node of its own (NCCL_HOSTID) and they exchange
through sockets. That shows what a card computes and holds and how a loss ends, and nothing about speed. A run refuses
this placement. The model has the shape of Qwen2.5-0.5B and random weights.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

import torch

from benchmarks.common import as_table
from benchmarks.gpu import system
from benchmarks.gpu.command_line import options_of, passed_on
from benchmarks.gpu.model import group
from benchmarks.gpu.rows import Found, Row, run_all, run_here
from cluster.memory.shape import SHAPES
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig
from learner.ranks.group import Group
from learner.ranks.rank import RankTrainer, ShardedRank
from learner.ranks.ranks import Meeting, Return

MODULE = "benchmarks.gpu.ranks"
HOST, START_S, STEP_S = "127.0.0.1", 120.0, 60.0
STEPS, LOST_IN = 4, 3
GROUPS, PER_GROUP = 8, 6


class Kind(NamedTuple):
    name: str
    ranks: int
    reduce: Literal["exact", "fast"] = "fast"
    sharded: bool = False
    mode: Literal["lora", "full"] = "lora"
    lost: bool = False  # one rank is killed in step LOST_IN


KINDS = (
    Kind("one", 1, "exact"),
    Kind("two", 2, "exact"),
    Kind("two-one-lost", 2, "exact", lost=True),
    Kind("two-fast", 2),
    Kind("two-sharded", 2, "exact", sharded=True),
    Kind("one-full", 1, mode="full"),
    Kind("two-full-sharded", 2, sharded=True, mode="full"),
)


COMPARED = ("one", "two", "two-one-lost", "two-sharded")  # exact sums: whose policies must be equal on a CPU
# On a card one rank does not repeat the bits of its own gradients; in the first step norms may differ by this share.
SAME_NORM = 1e-3


class Rank:
    """A process with one rank's trainer, that answers one call after the other begins."""

    def __init__(self, kind: Kind, rank: int, folder: str, device: str) -> None:
        self._pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=rank_process, args=(theirs, kind, rank, folder, device), daemon=True
        )
        self._process.start()

    def ask(self, name: str, *args: Any) -> None:
        self._pipe.send((name, args))

    def answer(self, name: str) -> Any:
        """To the call of that name; those to other calls are passed over. RuntimeError: it failed."""
        while True:
            if not self._pipe.poll(START_S):
                raise RuntimeError(f"{name}: no answer within {START_S:g} s")
            found, value, error = self._pipe.recv()
            if found == name and error is None:
                return value
            if found == name:
                raise RuntimeError(f"{name}: {error}")

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def wait(self) -> None:
        """For its end."""
        self._process.join(START_S)


def rank_process(pipe: Connection, kind: Kind, rank: int, folder: str, device: str) -> None:
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}-{os.getpid()}", "NCCL_SOCKET_IFNAME": "lo"}
    asyncio.run(serve(pipe, kind, rank, folder, device))


async def serve(pipe: Connection, kind: Kind, rank: int, folder: str, device: str) -> None:
    made = ShardedRank if kind.sharded else RankTrainer
    group = Group(rank, kind.ranks, device, sharded=kind.sharded)
    trainer = made(
        ModelConfig(path=folder, dtype="bfloat16" if device == "cuda" else "float32"),
        LearnerConfig(mode=kind.mode, reduce=kind.reduce, learning_rate=1e-4, token_budget=4096),
        device=device, group=group, temperature=1.0, max_completion_length=512, total_steps=100, seed=0,
    )  # fmt: skip
    running = set()
    while True:
        name, args = await asyncio.to_thread(pipe.recv)
        if name == "die_in_sum":
            vars(group)["sum"] = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            continue
        task = asyncio.create_task(one_call(pipe, trainer, name, args))
        running.add(task)
        task.add_done_callback(running.discard)


async def one_call(pipe: Connection, trainer: RankTrainer, name: str, args: Sequence[Any]) -> None:
    try:
        value = await (told(trainer) if name == "told" else getattr(trainer, name)(*args))
    except Exception as error:
        pipe.send((name, None, f"{type(error).__name__}: {error}"))
    else:
        pipe.send((name, value, None))


async def told(trainer: RankTrainer) -> Found:
    """Of the policy and of the memory that this rank allocates on a card, in bytes."""
    _, exported = await trainer.outgoing()
    on_card = torch.cuda.is_initialized()
    return {
        "digest": exported.policy_id.digest,
        "held_bytes": torch.cuda.memory_allocated() if on_card else 0,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_card else 0,
    }


def everyone(ranks: Sequence[Rank], name: str, each: Sequence[Sequence[Any]]) -> list[Any]:
    for rank, args in zip(ranks, each, strict=True):
        rank.ask(name, *args)
    return [rank.answer(name) for rank in ranks]


def meeting(ranks: Sequence[Rank]) -> Meeting:
    ranks[0].ask("open", HOST, START_S)
    return Meeting(HOST, ranks[0].answer("open"), START_S, STEP_S)


def measure(options: argparse.Namespace, kind: Kind, device: str) -> Found:
    """STEPS steps; the seconds of the last, the loss of each, and the policy in the end."""
    shape = system.TINY if options.tiny else SHAPES["Qwen2.5-0.5B"]
    lengths = (16, 24) if options.tiny else (128, 256)
    folder = str(system.model(options, shape).absolute())
    batch = [group(i, lengths[0], [lengths[1] - 8 * (i % 4)] * PER_GROUP, shape.vocab) for i in range(GROUPS)]
    ranks = [Rank(kind, rank, folder, device) for rank in range(kind.ranks)]
    met = meeting(ranks)
    everyone(ranks, "join", [(met, HOST)] * kind.ranks)
    found: Found = {"losses": [], "gradient_norms": [], "sums": kind.reduce}
    for number in range(1, STEPS + 1):
        started = time.perf_counter()
        if kind.lost and number == LOST_IN:
            found |= lose_one(ranks, partial(Rank, kind, 1, folder, device), batch, number)
        metrics = everyone(ranks, "numbered_step", [(batch, number)] * kind.ranks)
        found["losses"].append(metrics[0]["loss/total"])
        found["gradient_norms"].append(metrics[0]["loss/grad_norm"])
        found["step_seconds"] = time.perf_counter() - started
    if not all(math.isfinite(norm) and norm > 0 for norm in found["gradient_norms"]):
        raise RuntimeError(
            f"gradient norms {found['gradient_norms']}: nothing is trained, so equal policies say nothing"
        )
    for rank, one in enumerate(everyone(ranks, "told", [()] * kind.ranks)):
        found |= {f"{name}_{rank}": value for name, value in one.items()}
    for one in ranks:
        one.kill()
    digests = {found[name] for name in found if name.startswith("digest_")} - {""}  # of a whole model rank 0 has one
    if len(digests) != 1:
        raise RuntimeError(f"the ranks end with different policies: {digests}")
    return found


def lose_one(ranks: list[Rank], fresh: Any, batch: list[Any], number: int) -> Found:
    """Rank 1 ends where it would sum with rank 0, which waits; a fresh process gets rank 0's state. Its seconds."""
    ranks[1].ask("die_in_sum")
    for rank in ranks:
        rank.ask("numbered_step", batch, number)
    ranks[1].wait()
    killed = time.perf_counter()
    ranks[1] = fresh()
    met = meeting(ranks)  # answered once the fresh process listens, too: its start is most of the time
    everyone(ranks, "rejoin", [(met, HOST, Return(0, number))] * 2)
    return {"rejoined_seconds": time.perf_counter() - killed}


def report(found: dict[str, Found]) -> str:
    """Equal digests are equal policies. loss: of the last step."""
    header = ["ranks", "sums", "policy", "held GB a rank", "peak GB a rank", "rejoined s", "gradient norms", "loss"]
    lines = []
    for name, one in found.items():
        if one["status"] != "ok":
            lines.append([name, one["status"], *[""] * 6])
            continue
        count = sum(key.startswith("digest_") for key in one)
        memory = [" ".join(f"{one[f'{kind}_bytes_{r}'] / 1e9:.2f}" for r in range(count)) for kind in ("held", "peak")]
        rejoined = f"{one['rejoined_seconds']:.1f}" if "rejoined_seconds" in one else ""
        norms = " ".join(f"{norm:.5f}" for norm in one["gradient_norms"])
        lines.append([name, one["sums"], one["digest_0"][:12], *memory, rejoined, norms, f"{one['losses'][-1]:.6f}"])
    return f"## Several ranks on one card\n\n{as_table(header, lines)}\n"


def main() -> int:
    options = options_of(__doc__, 20)
    rows = [Row(f"r-{kind.name}", partial(measure, options, kind)) for kind in KINDS]
    if options.row:
        row = next(row for row in rows if row.name == options.row)
        run_here(row, options.device, options.folder / f"{row.name}.json")
        return 0
    passed = passed_on(options)
    wanted = [row for row in rows if row.name.startswith(tuple(options.only))]
    found = run_all(MODULE, wanted, options.folder, passed, options.minutes)
    text = report(found)
    (options.folder / "ranks.md").write_text(text)
    print(text)
    compared = [one for name in COMPARED if (one := found.get(f"r-{name}", {})).get("status") == "ok"]
    wrong = difference(compared, options.device)
    if wrong:
        print(f"{', '.join(COMPARED)}: {wrong}")
    return 0 if not wrong and all(one["status"] == "ok" for one in found.values()) else 1


def difference(compared: Sequence[Found], device: str) -> str:
    """What differs that should not, or nothing."""
    if device == "cpu":
        return "the policies differ" if len({one["digest_0"] for one in compared}) > 1 else ""
    norms = [one["gradient_norms"][0] for one in compared]
    if norms and max(norms) - min(norms) > SAME_NORM * min(norms):
        return f"the gradients of the first step differ: norms {norms}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
