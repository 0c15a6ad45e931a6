"""Ranks of the learner on one machine: equal policies, what two gain over one, how evenly the work is divided, what a
base in shards (memory.layout: sharded) saves and costs, frozen and trained as a whole, the loss of a rank in a step.

    PYTHONPATH=. python -m benchmarks.learner.ranks                          a core for each rank, with gloo
    PYTHONPATH=. python -m benchmarks.learner.ranks --device cuda            all ranks on one card, with NCCL
    PYTHONPATH=. python -m benchmarks.learner.ranks --tiny --turns 1         the rehearsal, into build/rehearsal

CPU, speed: a random 13M-parameter Llama in float32, 16 groups of 6 completions, about 10,000 tokens a step, in
micro-batches of at least 2048 tokens: between the 512 that a CPU takes and the 4096 of a card. CPU, memory: a random
Llama of 200M parameters, its files in float32 and the learner in bfloat16, so that no rank maps the files, and a step
of a few hundred tokens, so that little but the base is held. Each allocation of 64 KiB or more is the system's own
(MALLOC_MMAP_THRESHOLD_), so that what was freed is not counted.

Card: the shape of Qwen2.5-0.5B, random weights. NCCL takes no two ranks on one card of one node, so each rank names a
node of its own (NCCL_HOSTID) and they exchange through sockets. That shows what a card computes and holds and how a
loss ends, and nothing about speed. A run refuses this placement.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from benchmarks.common import RESULTS, as_table, parser_of, under
from benchmarks.gpu import system
from benchmarks.gpu.model import group
from benchmarks.gpu.rows import TOKENIZER, Found, folder_for, told_of
from cluster.memory.shape import SHAPES
from examples.random_model import VOCAB_SIZE, make_tiny_model
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig
from learner.ranks.group import Group
from learner.ranks.rank import RankTrainer, ShardedRank
from learner.ranks.ranks import Meeting, Return
from learner.trainer import optimizer

HOST, START_S, STEP_S = "127.0.0.1", 600.0, 60.0
LOST_IN = 3  # the step
BUDGET, LEAST = 4096, 2048  # tokens of a micro-batch, at most, and at least on a CPU
SPEED: dict[str, int] = {"hidden_size": 384, "layers": 8, "heads": 6, "kv_heads": 3, "max_length": 512}
LARGE: dict[str, int] = {"hidden_size": 768, "layers": 32, "heads": 12, "kv_heads": 4, "max_length": 512}
# On a card one rank does not repeat the bits of its own gradients; in the first step norms may differ by this share.
SAME_NORM = 1e-3


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
BASES = {"lora": "one", "full": "one-full"}  # with which the others are compared
COMPARED = ("one", "two", "two-one-lost", "two-sharded")  # exact sums: whose policies must be equal on a CPU


class Case(NamedTuple):
    """What is trained. own_pages: see MALLOC_MMAP_THRESHOLD_ above."""

    name: str
    folder: str
    dtype: Any
    batch: list[pa.Table]
    steps: int = 4
    own_pages: bool = False


class Rank:
    """A process with one rank's trainer, that answers one call after the other begins."""

    def __init__(self, case: Case, kind: Kind, device: str, rank: int) -> None:
        self._pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=rank_process, args=(theirs, case, kind, device, rank), daemon=True
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


def rank_process(pipe: Connection, case: Case, kind: Kind, device: str, rank: int) -> None:
    if device == "cuda":
        os.environ |= {"NCCL_HOSTID": f"rank-{rank}-{os.getpid()}", "NCCL_SOCKET_IFNAME": "lo"}
    else:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        torch.set_num_threads(1)
        optimizer.LEAST_ON_CPU = LEAST
    asyncio.run(serve(pipe, case, kind, device, rank))


async def serve(pipe: Connection, case: Case, kind: Kind, device: str, rank: int) -> None:
    before = held(device)
    made = ShardedRank if kind.sharded else RankTrainer
    ranks = Group(rank, kind.ranks, device, sharded=kind.sharded)
    trainer = made(
        ModelConfig(path=case.folder, dtype=case.dtype),
        LearnerConfig(mode=kind.mode, reduce=kind.reduce, learning_rate=1e-4, token_budget=BUDGET),
        device=device, group=ranks, temperature=1.0, max_completion_length=512, total_steps=100, seed=0,
    )  # fmt: skip
    tokens: list[int] = []
    running = set()
    while True:
        name, args = await asyncio.to_thread(pipe.recv)
        if name == "die_in_sum":
            vars(ranks)["sum"] = lambda _: os.kill(os.getpid(), signal.SIGKILL)
            continue
        work = told(trainer, tokens, before, *args) if name == "told" else getattr(trainer, name)(*args)
        task = asyncio.create_task(one_call(pipe, name, work))
        running.add(task)
        task.add_done_callback(running.discard)


async def one_call(pipe: Connection, name: str, work: Any) -> None:
    started, spent = time.perf_counter(), time.process_time()
    try:
        value = await work
    except Exception as error:
        return pipe.send((name, None, f"{type(error).__name__}: {error}"))
    if name == "numbered_step":
        value |= {"wall": time.perf_counter() - started, "cpu": time.process_time() - spent}
    return pipe.send((name, value, None))


def held(device: str) -> int:
    """Bytes: of anonymous memory of this process, on a card what it has allocated there."""
    if device == "cuda":
        return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024


async def told(trainer: Any, tokens: list[int], before: int, ended: bool) -> Found:
    """Of the memory that this rank holds now, and at the end of the policy and of the tokens of its micro-batches,
    padding included, which are counted from the first call on."""
    on_card = torch.cuda.is_initialized()
    found: Found = {"held": held("cuda" if on_card else "cpu") - before}
    if ended:
        _, exported = await trainer.outgoing()
        peak = torch.cuda.max_memory_allocated() if on_card else None
        return found | {"digest": exported.policy_id.digest, "peak": peak, "tokens": sum(tokens)}
    plain = trainer._policy.predicting  # of a base in shards it is there since the ranks have met

    def predicting(batch: Any) -> Any:
        tokens.append(0 if batch.idle else batch.ids.numel())
        return plain(batch)

    trainer._policy.predicting = predicting
    return found


def everyone(ranks: Sequence[Rank], name: str, *args: Any) -> list[Any]:
    for rank in ranks:
        rank.ask(name, *args)
    return [rank.answer(name) for rank in ranks]


def meeting(ranks: Sequence[Rank]) -> Meeting:
    ranks[0].ask("open", HOST, START_S)
    return Meeting(HOST, ranks[0].answer("open"), START_S, STEP_S)


def measure(case: Case, kind: Kind, device: str) -> Found:
    """Steps; the seconds of all but the first, the loss and the gradient's norm of each, and the policy in the end."""
    os.environ.pop("MALLOC_MMAP_THRESHOLD_", None)
    os.environ.update({"MALLOC_MMAP_THRESHOLD_": "65536"} if case.own_pages else {})  # of the processes to come
    ranks = [Rank(case, kind, device, rank) for rank in range(kind.ranks)]
    everyone(ranks, "join", meeting(ranks), HOST)
    loaded = everyone(ranks, "told", False)
    found: Found = {"losses": [], "norms": [], "cpu": [], "wall": [], "loaded": [one["held"] for one in loaded]}
    for number in range(1, case.steps + 1):
        if kind.lost and number == LOST_IN:
            found["rejoined_s"] = lose_one(ranks, partial(Rank, case, kind, device, 1), case.batch, number)
        metrics = everyone(ranks, "numbered_step", case.batch, number)
        found["losses"].append(metrics[0]["loss/total"])
        found["norms"].append(metrics[0]["loss/grad_norm"])
        if number > 1:
            for key in ("cpu", "wall"):
                found[key].append(max(one[key] for one in metrics))
    last = everyone(ranks, "told", True)
    for one in ranks:
        one.kill()
    if not all(math.isfinite(norm) and norm > 0 for norm in found["norms"]):
        raise RuntimeError(f"gradient norms {found['norms']}: nothing is trained, so equal policies say nothing")
    digests = {one["digest"] for one in last} - {""}  # of a whole model rank 0 has one
    if len(digests) != 1:
        raise RuntimeError(f"the ranks end with different policies: {digests}")
    return found | {"digest": digests.pop()} | {key: [one[key] for one in last] for key in ("held", "peak", "tokens")}


def lose_one(ranks: list[Rank], fresh: Any, batch: list[Any], number: int) -> float:
    """Rank 1 ends where it would sum with rank 0, which waits; a fresh process gets rank 0's state. Its seconds."""
    ranks[1].ask("die_in_sum")
    for rank in ranks:
        rank.ask("numbered_step", batch, number)
    ranks[1].wait()
    killed = time.perf_counter()
    ranks[1] = fresh()
    met = meeting(ranks)  # answered once the fresh process listens, too: its start is most of the time
    everyone(ranks, "rejoin", met, HOST, Return(0, number))
    return time.perf_counter() - killed


def cases(folder: Path, options: Namespace) -> list[Case]:
    """Those of the device, with their models."""
    if options.device == "cuda":
        shape = system.TINY if options.tiny else SHAPES["Qwen2.5-0.5B"]
        batch = [group(i, 128, [256 - 8 * (i % 4)] * 6, shape.vocab) for i in range(8)]
        return [Case("card", str(system.model(options, shape).absolute()), "bfloat16", batch)]
    if options.tiny:
        batch = [group(i, 16, [24 - 8 * (i % 2)] * 4, VOCAB_SIZE) for i in range(4)]
        return [Case("speed", str(make_tiny_model(folder / "tiny")), "float32", batch)]
    random = np.random.default_rng(0)
    batch = [group(i, 60, random.integers(20, 201, 6).tolist(), VOCAB_SIZE) for i in range(16)]
    small, large = (
        str(make_tiny_model(folder / name, tied=False, family="Llama", initializer_range=0.02, **sizes))
        for name, sizes in (("small", SPEED), ("large", LARGE))
    )
    memory = Case("memory", large, "bfloat16", batch[:1], steps=1, own_pages=True)
    return [Case("speed", small, "float32", batch), memory]


def report(found: dict[str, list[Found]]) -> str:
    """A line for each kind; of several turns the medians. Equal digests are equal policies."""
    header = ["ranks", "policy", "CPU-s a step of the busiest", "gain", "wall s", "gain", "tokens a rank",
              "loaded MB a rank", "held MB a rank", "peak MB a rank", "rejoined s", "gradient norms",
              "loss"]  # fmt: skip
    lines = []
    for kind in KINDS:
        if (turns := found.get(kind.name)) is None:
            continue
        times = []
        for key in ("cpu", "wall"):
            own, base = ([s for one in some for s in one[key]] for some in (turns, found.get(BASES[kind.mode], turns)))
            times += [f"{median(own):.2f}", f"{median(base) / median(own):.2f}"] if own else ["", ""]
        one = turns[-1]
        memory = [
            " ".join("" if b is None else f"{b / 1e6:.0f}" for b in one[key]) for key in ("loaded", "held", "peak")
        ]
        rejoined = f"{one['rejoined_s']:.1f}" if "rejoined_s" in one else ""
        norms = " ".join(f"{norm:.5f}" for norm in one["norms"])
        tokens = " : ".join(str(count // len(one["losses"])) for count in one["tokens"])
        lines.append([kind.name, one["digest"][:12], *times, tokens, *memory, rejoined, norms,
                      f"{one['losses'][-1]:.6f}"])  # fmt: skip
    return as_table(header, lines)


def difference(found: dict[str, list[Found]], device: str) -> str:
    """What differs that should not, or nothing."""
    compared = [one for name in COMPARED for one in found.get(name, [])]
    if device == "cpu":
        return "the policies differ" if len({one["digest"] for one in compared}) > 1 else ""
    norms = [one["norms"][0] for one in compared]
    if norms and max(norms) - min(norms) > SAME_NORM * min(norms):
        return f"the gradients of the first step differ: norms {norms}"
    return ""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tiny", action="store_true", help="to rehearse")
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS], help="else all")
    parser.add_argument("--turns", type=int, default=3, help="of the kinds, where speed is measured")
    parser.set_defaults(models="build/models", tokenizer=str(TOKENIZER))
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if options.kinds is None or kind.name in options.kinds]
    told, found = told_of(options.device), dict[str, dict[str, list[Found]]]()
    with tempfile.TemporaryDirectory() as name:
        for case in cases(Path(name), options):
            own = found.setdefault(case.name, {})
            for turn in range(1 if case.steps == 1 else options.turns):
                for kind in kinds:
                    if not (kind.lost and case.steps < LOST_IN):
                        own.setdefault(kind.name, []).append(measure(case, kind, options.device))
                        print(f"{case.name}, turn {turn + 1}: {kind.name}", flush=True)
    tables = "\n\n".join(f"## {case}\n\n{report(own)}" for case, own in found.items())
    text = (
        f"# Ranks of the learner\n\n{tables}\n\n{under(told, f'Medians of {options.turns} turns; memory of the last')}"
    )
    on_cpu = options.device == "cpu" and not options.tiny
    folder = RESULTS if on_cpu else folder_for(options.device, options.tiny)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ranks.json").write_text(json.dumps({"conditions": told, "cases": found}, indent=1) + "\n")
    (folder / "ranks.md").write_text(text + "\n")
    print(text)
    wrong = [words for own in found.values() if (words := difference(own, options.device))]
    raise SystemExit("; ".join(wrong) or 0)


if __name__ == "__main__":
    main()
