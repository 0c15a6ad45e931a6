"""Ranks of the learner on one machine, a core each: what two of them gain over one, what exact sums cost, how evenly
the work is divided, and what a base in shards (memory.layout: sharded) saves and costs, frozen and trained as a whole.

    PYTHONPATH=. python -m benchmarks.learner.ranks

Speed: a random 13M-parameter Llama in float32, 16 groups of 6 completions, about 10,000 tokens a step, in
micro-batches of at least 2048 tokens: between the 512 that a CPU takes and the 4096 of a card. Memory: a random
Llama of 200M parameters, its files in float32 and the learner in bfloat16, so that no rank maps the files, and a step
of a few hundred tokens, so that little but the base is held. Each allocation of 64 KiB or more is the system's own
(MALLOC_MMAP_THRESHOLD_), so that what was freed is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from benchmarks.common import as_table, conditions, save, under
from examples.random_model import make_tiny_model
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig
from learner.ranks.group import Group
from learner.ranks.rank import RankTrainer, ShardedRank
from learner.ranks.ranks import Meeting
from learner.trainer import optimizer
from learner.trainer.trainer import Trainer
from rollout.fakes import make_group
from rollout.types import Completion

HOST, LONG_S, LONGEST = "127.0.0.1", 600.0, 200
BUDGET, LEAST = 4096, 2048  # tokens of a micro-batch, at most and at least
SPEED: dict[str, int] = {"hidden_size": 384, "layers": 8, "heads": 6, "kv_heads": 3, "max_length": 512}
LARGE: dict[str, int] = {"hidden_size": 768, "layers": 32, "heads": 12, "kv_heads": 4, "max_length": 512}


class Kind(NamedTuple):
    name: str
    ranks: int
    reduce: Literal["exact", "fast"]
    sharded: bool = False
    mode: Literal["lora", "full"] = "lora"


KINDS = (
    Kind("one rank", 1, "fast"),
    Kind("two, fast sums", 2, "fast"),
    Kind("two, exact sums", 2, "exact"),
    Kind("two, exact sums, base in shards", 2, "exact", sharded=True),
    Kind("one rank, whole model", 1, "fast", mode="full"),
    Kind("two, whole model in shards", 2, "fast", sharded=True, mode="full"),
)
BASES = {"lora": KINDS[0], "full": KINDS[4]}  # with which the others are compared


class Told(NamedTuple):
    """By one rank. cpu, wall: seconds of each step. tokens: of its micro-batches in a step, padding included. before,
    loaded, most, held: MB of anonymous memory, before there is a model, with it, the most on the way, and after the
    steps, with the states of the optimizer."""

    cpu: list[float]
    wall: list[float]
    tokens: int
    before: float
    loaded: float
    most: float
    held: float


def anonymous() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024 / 1e6


@contextmanager
def watching(most: list[float]) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            most.append(anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def groups(count: int) -> list[pa.Table]:
    """Of 6 completions with 20 to 200 tokens each, under prompts of 60."""
    random = np.random.default_rng(0)
    found = []
    for position in range(count):
        lengths = random.integers(20, LONGEST + 1, 6)
        prompt = random.integers(0, 256, 60).tolist()
        completions = [
            Completion(random.integers(0, 256, n).astype(np.int32), np.full(n, -5.5, np.float32), "stop",
                       np.zeros(n, np.int32)) for n in lengths
        ]  # fmt: skip
        rewards = random.normal(size=6).tolist()
        table = make_group(position, completions=completions, rewards=rewards)
        ids = pa.array([prompt] * 6, table.schema.field("prompt_ids").type)
        found.append(
            table.set_column(table.schema.get_field_index("prompt_ids"), table.schema.field("prompt_ids"), ids)
        )
    return found


async def serve(end: Connection, rank: int, kind: Kind, path: str, dtype: str, count: int, steps: int) -> Told:
    before, most = anonymous(), [0.0]
    with watching(most):
        trainer = made(rank, kind, path, dtype)
        if isinstance(trainer, RankTrainer):
            if rank == 0:
                end.send(await trainer.open(HOST, LONG_S))
            await trainer.join(Meeting(HOST, end.recv(), LONG_S, LONG_S), HOST)
        loaded = anonymous()
    tokens = counted(trainer)
    batch, cpu, wall = groups(count), [], []
    for _ in range(steps):
        tokens.clear()
        started, spent = time.perf_counter(), time.process_time()
        await trainer.step(batch)
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - spent)
    return Told(cpu, wall, sum(tokens), before, loaded, max(most), anonymous())


def made(rank: int, kind: Kind, path: str, dtype: Any) -> Trainer:
    group = Group(rank, kind.ranks, "cpu", sharded=kind.sharded)
    options: dict[str, Any] = {"temperature": 1.0, "max_completion_length": LONGEST, "total_steps": 100, "seed": 0}
    settings = (
        ModelConfig(path=path, dtype=dtype),
        LearnerConfig(mode=kind.mode, reduce=kind.reduce, token_budget=BUDGET),
    )
    if kind.ranks == 1:
        return Trainer(*settings, device="cpu", **options)
    return (ShardedRank if kind.sharded else RankTrainer)(*settings, device="cpu", group=group, **options)


def counted(trainer: Any) -> list[int]:
    """Filled with the tokens of each micro-batch from here on."""
    plain, found = trainer._policy.predicting, []

    def predicting(batch: Any) -> Any:
        found.append(0 if batch.idle else batch.ids.numel())
        return plain(batch)

    trainer._policy.predicting = predicting
    return found


def process(end: Connection, rank: int, *what: Any) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    optimizer.LEAST_ON_CPU = LEAST
    end.send(asyncio.run(serve(end, rank, *what)))


def measured(kind: Kind, path: str, dtype: str, count: int, steps: int) -> list[Told]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(kind.ranks)]
    for rank, (_, theirs) in enumerate(pipes):
        context.Process(target=process, args=(theirs, rank, kind, path, dtype, count, steps), daemon=True).start()
    if kind.ranks > 1:
        port = pipes[0][0].recv()
        for ours, _ in pipes:
            ours.send(port)
    return [ours.recv() for ours, _ in pipes]


def speed_rows(path: str, turns: int, steps: int) -> list[dict[str, Any]]:
    """The kinds in turns, the first step of each left out; medians."""
    seen: dict[str, list[list[Told]]] = {kind.name: [] for kind in KINDS}
    for turn in range(turns):
        for kind in KINDS:
            seen[kind.name].append(measured(kind, path, "float32", 16, steps + 1))
            print(f"turn {turn + 1} of {turns}: {kind.name}", flush=True)
    rows = []
    for kind in KINDS:
        ranks = [[told[rank] for told in seen[kind.name]] for rank in range(kind.ranks)]
        slowest = [
            max(steps) for told in seen[kind.name] for steps in zip(*(one.wall[1:] for one in told), strict=True)
        ]
        cpu = max(statistics.median(s for told in own for s in told.cpu[1:]) for own in ranks)
        wall, tokens = statistics.median(slowest), [own[0].tokens for own in ranks]
        rows.append({"kind": kind.name, "mode": kind.mode, "cpu": cpu, "wall": wall, "tokens": tokens})
    return rows


def memory_rows(path: str) -> list[dict[str, Any]]:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of the processes to come
    rows = []
    for kind in (KINDS[0], *KINDS[2:]):
        told = measured(kind, path, "bfloat16", 1, 1)
        row = {
            f"{name}_mb": max(getattr(one, name) - one.before for one in told) for name in ("loaded", "most", "held")
        }
        rows.append({"kind": kind.name} | row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small = str(
            make_tiny_model(Path(folder) / "small", tied=False, family="Llama", initializer_range=0.02, **SPEED)
        )
        large = make_tiny_model(Path(folder) / "large", tied=False, family="Llama", initializer_range=0.02, **LARGE)
        speed = speed_rows(small, asked.turns, asked.steps)
        memory = memory_rows(str(large))
        base = (large / "model.safetensors").stat().st_size / 2e6
    one = {mode: next(row for row in speed if row["kind"] == kind.name) for mode, kind in BASES.items()}
    times = [
        (row["kind"], f"{row['cpu']:.2f}", f"{one[row['mode']]['cpu'] / row['cpu']:.2f}", f"{row['wall']:.2f}",
         f"{one[row['mode']]['wall'] / row['wall']:.2f}", " : ".join(map(str, row["tokens"]))) for row in speed
    ]  # fmt: skip
    held = [(row["kind"], *(f"{row[f'{name}_mb']:.0f}" for name in ("loaded", "most", "held"))) for row in memory]
    told = conditions()
    text = "\n\n".join([
        "# Ranks of the learner, a core each",
        as_table(("ranks", "CPU-s a step of the busiest", "gain", "wall s", "gain", "tokens a rank"), times),
        f"A base of {base:.0f} MB, bfloat16; MB of anonymous memory beside what the process had without a model:",
        as_table(("ranks", "loaded, of one rank", "most while it loads", "after a step"), held),
        under(told, f"Micro-batches of at least {LEAST} tokens. Medians of {asked.turns} turns of {asked.steps} steps"),
    ])  # fmt: skip
    save("ranks", {"conditions": told, "speed": speed, "memory": memory, "base_mb": base}, text)


if __name__ == "__main__":
    main()
