"""One rollout worker that is brought back when its process is lost, with the newest policy before anybody asks it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pyarrow as pa

from cluster.actor import ActorDied, DeadlineExceeded, RevivableActor, StartFailed
from cluster.config import DeadlineConfig
from rollout.schema import Problem
from rollout.service import RolloutService
from rollout.types import Sampling

log = logging.getLogger("rollout")

T = TypeVar("T")

MAX_REVIVALS = 3  # in a row, without one finished group in between: then the fault is not a passing one


class GivenUp(RuntimeError):
    """A worker was lost for a reason that fresh processes do not cure; the text names it and the last cause."""


class Losses:
    """How often in a row a worker was lost, and of what."""

    def __init__(self, name: str) -> None:
        self.name, self.count = name, 0
        self._reason: str | None = None

    def forget(self) -> None:
        """It has done something useful since."""
        self.count, self._reason = 0, None

    def add(self, error: ActorDied | DeadlineExceeded) -> None:
        """Counts a loss. Raises GivenUp after too many, or when the same cause comes twice in a row: a fresh process
        would end alike."""
        self.count += 1
        if isinstance(error, StartFailed) and error.wrong_input:
            raise error
        before, self._reason = self._reason, error.reason if isinstance(error, ActorDied) else None
        if self._reason is not None and self._reason == before:
            raise GivenUp(f"{error} (twice in a row, so it is not tried again)") from error
        if self.count > MAX_REVIVALS:
            raise GivenUp(
                f"{self.name}: lost {self.count} times in a row without finishing a group; last: {error}"
            ) from error
        log.warning("%s; starting a fresh process (%d of %d)", error, self.count, MAX_REVIVALS)


async def until_started(name: str, start: Callable[[], Awaitable[None]], again: Callable[[], Awaitable[None]]) -> None:
    """Awaits start(); while the process is lost in it, awaits again(). Raises GivenUp, StartFailed,
    DeadlineExceeded."""
    losses = Losses(name)
    while True:
        try:
            return await start()
        except ActorDied as error:
            losses.add(error)
            start = again


async def _nothing() -> None:
    """For a worker that is not supplied with policies."""


def _no_group() -> None:
    """For a call whose loss costs nothing but another call."""


@dataclass(slots=True)
class Supply:
    """What supplies a worker with policies.

    leave: is told that the process is lost. rearm: brings a fresh one the newest policy, if there is one. others:
    whether another worker is supplied meanwhile.
    """

    leave: Callable[[], Awaitable[None]] = _nothing
    rearm: Callable[[], Awaitable[None]] = _nothing
    others: Callable[[], bool] = lambda: False


class SupervisedWorker:
    """The process of one worker through all its lives.

    supply: set by who supplies the worker with policies.
    replacing: what a fresh process is started inside of; set by who must make room for it.
    """

    def __init__(self, actor: RevivableActor[RolloutService], deadlines: DeadlineConfig) -> None:
        self.actor, self.deadlines = actor, deadlines
        self.name = actor.name
        self.supply = Supply()
        self.replacing: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self.restarts = 0
        self._life = 0
        self._losses = Losses(actor.name)  # since the last finished group
        self._revival: asyncio.Task[None] | None = None

    @property
    def away(self) -> bool:
        """Whether its process is lost and no fresh one is ready."""
        return self._revival is not None and not self._revival.done()

    async def present(self) -> None:
        """Waits until it is not away. Raises what its replacement failed of meanwhile."""
        while self._revival is not None and not self._revival.done():
            await asyncio.shield(self._revival)  # it goes on if who waits is cancelled

    async def attempt(self, ask: Callable[[], Awaitable[T]], lost: Callable[[], None] = _no_group) -> T | None:
        """What `ask` gives; None if the process was lost meanwhile (a fresh one is there when this returns, `lost` was
        called long before)."""
        await self.present()  # a fresh process is being given its policy: nothing is asked of it before
        life = self._life
        try:
            return await ask()
        except (ActorDied, DeadlineExceeded) as error:
            lost()
            await self._revived(life, error)
            return None

    async def keep(self) -> None:
        """Replaces the process whenever it is lost, for ever, also while nobody asks anything of it. One that hangs is
        lost, too: its event loop answers while it generates and while it takes a policy."""
        silence_s = self.deadlines.heartbeat / 2
        while True:
            await self.attempt(partial(self.actor.until_ended, silence_s))

    async def replaced_no_more(self) -> None:
        """Gives up the fresh process that is being started, if one is."""
        if self._revival is not None:
            self._revival.cancel()
            await asyncio.gather(self._revival, return_exceptions=True)

    async def certainly(self, method: Callable[[RolloutService], Awaitable[None]]) -> None:
        """Calls a method that has no arguments and no answer; if the process is lost, once more on a fresh one."""

        async def ask() -> bool:
            await self.actor.call(method, self.deadlines.push)
            return True

        while not await self.attempt(ask):
            pass

    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table:
        """One group; losses before it are not held against the worker. Raises ActorDied or DeadlineExceeded if the
        process is lost meanwhile."""
        return self._finished(
            await self.actor.call(RolloutService.rollout, self.deadlines.group, problem, sampling, attempt)
        )

    async def rollouts(
        self, problems: Sequence[Problem], samplings: Sequence[Sampling], attempt: int, rounds: int
    ) -> pa.Table:
        """The groups of several problems, of which the last begins once others have ended, `rounds` times; otherwise as
        `rollout`."""
        deadline_s = rounds * self.deadlines.group
        return self._finished(await self.actor.call(RolloutService.rollouts, deadline_s, problems, samplings, attempt))

    def _finished(self, group: pa.Table | None) -> pa.Table:
        if group is None:  # another call was lost just before, and a fresh process got this one
            raise ActorDied(f"{self.name}: its process was replaced before it had a policy")
        self._losses.forget()
        return group

    async def _revived(self, life: int, error: ActorDied | DeadlineExceeded) -> None:
        """Waits for one fresh process for all calls that were lost together; groups that they had are issued again."""
        if self._life == life and not self.away:
            self._revival = asyncio.create_task(self._revive(error))
        await self.present()

    async def _revive(self, error: ActorDied | DeadlineExceeded) -> None:
        while True:
            self._losses.add(error)
            await self.supply.leave()
            try:
                async with self.replacing():
                    await self._replace()
                await self.supply.rearm()
                break
            except (ActorDied, DeadlineExceeded) as again:  # lost while it was being brought back
                error = again
        self.restarts += 1
        self._life += 1

    async def _replace(self) -> None:
        """A fresh process. While other workers go on nobody waits for it, and the node that it needs may come back."""
        while True:
            try:
                return await self.actor.revive(self.deadlines.start)
            except DeadlineExceeded as late:
                if not self.supply.others():
                    raise
                log.warning("%s; the other generators go on, and it is tried again", late)
