"""Ranks in real processes of this machine, without Ray: the same calls reach all of them."""

from __future__ import annotations

import asyncio
import faulthandler
import multiprocessing
import os
import signal
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from learner.ranks.group import Group
from learner.ranks.rank import RankTrainer
from learner.ranks.ranks import Meeting, Return
from tests.learner.trainers import make_trainer

HOST, DEADLINE_S = "127.0.0.1", 60.0

Work = Callable[..., Awaitable[Any]]  # what a rank does with its trainer: a function of a module, found by its name


class Failed(NamedTuple):
    """What a rank's work raised."""

    kind: str
    text: str


class RankProcesses:
    """`ranks` trainers as tests.learner.trainers.make_trainer makes them, each in a process of one thread."""

    def __init__(self, ranks: int, path: str, settings: dict[str, Any], *, sharded: bool = False) -> None:
        self._made = (ranks, path, settings, sharded)
        started = [self._start(rank) for rank in range(ranks)]
        self.ends = [end for end, _ in started]
        self.processes = [process for _, process in started]
        assert self.all(join, self._open()) == [None] * ranks

    def replace(self, lost: int, undo: int | None) -> None:
        """A fresh process for a rank that was killed; the others meet it, and all are where the step `undo` began."""
        self.processes[lost].join()
        self.ends[lost], self.processes[lost] = self._start(lost)
        source = 0 if lost > 0 else 1
        assert self.all(rejoin, self._open(), source, undo) == [None] * len(self.ends)

    def _start(self, rank: int) -> tuple[Connection, ForkServerProcess]:
        context = multiprocessing.get_context("forkserver")  # which imports torch once for all
        context.set_forkserver_preload(["tests.learner.rank_processes"])
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, rank, *self._made), daemon=True)
        process.start()
        theirs.close()
        return ours, process

    def _open(self) -> int:
        self.ends[0].send((open_, ()))
        port: int = self._answer(0)
        return port

    def all(self, work: Work, *args: Any) -> list[Any]:
        """What each rank gives, or how it failed; None of one that died."""
        self.ask(work, *args)
        return self.answers()

    def ask(self, work: Work, *args: Any) -> None:
        for end in self.ends:
            end.send((work, args))

    def answers(self) -> list[Any]:
        return [self._answer(rank) for rank in range(len(self.ends))]

    def kill(self, rank: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def _answer(self, rank: int) -> Any:
        assert self.ends[rank].poll(DEADLINE_S), f"rank {rank} hangs"
        try:
            return self.ends[rank].recv()
        except EOFError:
            return None

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def rank_processes(ranks: int, path: str, *, sharded: bool = False, **settings: Any) -> Iterator[RankProcesses]:
    processes = RankProcesses(ranks, path, settings, sharded=sharded)
    try:
        yield processes
    finally:
        processes.end()


def _serve(end: Connection, rank: int, ranks: int, path: str, settings: dict[str, Any], sharded: bool) -> None:
    faulthandler.enable()  # a crash in native code says where it was, as in Ray's workers
    torch.set_num_threads(1)
    trainer: Any = make_trainer(path, group=Group(rank, ranks, "cpu", sharded=sharded), **settings)
    assert isinstance(trainer, RankTrainer)

    async def serve() -> None:
        while True:
            work, args = await asyncio.to_thread(end.recv)
            try:
                end.send(await work(trainer, *args))
            except Exception as error:
                end.send(Failed(type(error).__name__, "".join(traceback.format_exception(error))))

    asyncio.run(serve())


async def open_(trainer: Any) -> Any:
    return await trainer.open(HOST, DEADLINE_S)


async def join(trainer: Any, port: int) -> None:
    await trainer.join(Meeting(HOST, port, DEADLINE_S, DEADLINE_S), HOST)


async def rejoin(trainer: Any, port: int, source: int, undo: int | None) -> None:
    await trainer.rejoin(Meeting(HOST, port, DEADLINE_S, DEADLINE_S), HOST, Return(source, undo))


async def numbered_step(trainer: Any, groups: list[pa.Table], number: int) -> tuple[str, Any]:
    """The digest of the policy after it, and what the step said of itself."""
    metrics = await trainer.numbered_step(groups, number)
    _, exported = await trainer.outgoing()
    return exported.policy_id.digest, {k: v for k, v in metrics.items() if not k.startswith(("time/", "memory/"))}


async def doomed_step(trainer: Any, groups: list[pa.Table], number: int, rank: int, moment: str) -> tuple[str, Any]:
    """The same, in which that rank is killed: at its begin, before its first update, or when it has finished."""
    doomed, plain, done = trainer.rank == rank, trainer._updates.updater.step, []

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def update(*args: Any, **kwargs: Any) -> Any:
        done.append(1)
        return die() if doomed and moment == "middle" and len(done) == 1 else plain(*args, **kwargs)

    if doomed and moment == "begin":
        die()
    trainer._updates.updater.step = update
    try:
        answer = await numbered_step(trainer, groups, number)
    finally:
        trainer._updates.updater.step = plain
    if doomed:
        die()
    return answer


async def steps(trainer: Any, groups: list[pa.Table], count: int, packed: bool = True) -> list[tuple[str, Any]]:
    """After each step the digest of the policy, and what the step said of itself."""
    trainer._policy.packed &= packed
    told = []
    for _ in range(count):
        metrics = await trainer.step(groups)
        _, exported = await trainer.outgoing()
        told.append(
            (exported.policy_id.digest, {k: v for k, v in metrics.items() if not k.startswith(("time/", "memory/"))})
        )
    return told


async def gradients(trainer: Any, groups: list[pa.Table]) -> npt.NDArray[np.float32]:
    """Of all masters, after a step."""
    await trainer.step(groups)
    return np.concatenate([weight.grad.numpy().ravel() for weight in trainer._policy.masters.values()])


async def with_room_for(trainer: Any, tokens: int, groups: list[pa.Table]) -> tuple[Any, list[int], int]:
    """A step in which rank 0 has room for so many tokens: what it led to, the sizes of this rank's micro-batches, and
    the token budget after it."""
    plain, seen = trainer._policy.predicting, []

    def predicting(batch: Any) -> Any:
        seen.append(batch.ids.numel())
        if trainer._group.rank == 0 and batch.ids.numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain(batch)

    trainer._policy.predicting = predicting
    return (await steps(trainer, groups, 1))[0], seen, trainer._budget.tokens
