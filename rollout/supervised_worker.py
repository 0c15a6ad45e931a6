"""One rollout worker that is brought back when its process is lost, with the newest policy before anybody asks it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cluster.actor import Actor, ActorDied, DeadlineExceeded
from cluster.config import DeadlineConfig

log = logging.getLogger("rollout")

T = TypeVar("T")

MAX_REVIVALS = 3  # in a row, without one finished group in between: then the fault is not a passing one


async def _nothing() -> None:
    """A worker that nobody supplies with policies needs none."""


class SupervisedWorker:
    """The process of one worker through all its lives.

    rearm: brings a fresh process the newest policy, if there is one; set by who supplies the worker with policies.
    """

    def __init__(self, actor: Actor, deadlines: DeadlineConfig) -> None:
        self.actor, self.deadlines = actor, deadlines
        self.name = actor.name
        self.rearm: Callable[[], Awaitable[None]] = _nothing
        self.restarts = 0
        self._life = 0
        self._revivals = 0  # since the last finished group
        self._reviving = asyncio.Lock()

    async def attempt(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """What `ask` gives; None if the process was lost meanwhile (a fresh one is there when this returns)."""
        async with self._reviving:  # a fresh process is being given its policy: nothing is asked of it before
            life = self._life
        try:
            return await ask()
        except (ActorDied, DeadlineExceeded) as error:
            await self._revive(life, error)
            return None

    async def certainly(self, method: str) -> None:
        """Calls a method without arguments or answer, on a fresh process if one is lost by it."""

        async def ask() -> bool:
            await self.actor.call(method, deadline_s=self.deadlines.push)
            return True

        while not await self.attempt(ask):
            pass

    def finished_group(self) -> None:
        """Losses before this are not held against the worker."""
        self._revivals = 0

    async def _revive(self, life: int, error: Exception) -> None:
        """One fresh process for all calls that were lost together."""
        async with self._reviving:
            while self._life == life:
                self._revivals += 1
                if self._revivals > MAX_REVIVALS:
                    raise RuntimeError(
                        f"{self.name}: lost {self._revivals} times in a row without finishing a group; last: {error}"
                    ) from error
                log.warning(
                    "%s; restarting it (%d of %d), its groups are issued again", error, self._revivals, MAX_REVIVALS
                )
                try:
                    await self.actor.revive(isinstance(error, DeadlineExceeded), self.deadlines.start)
                    await self.rearm()
                except (ActorDied, DeadlineExceeded) as again:  # lost while it was being brought back
                    error = again
                else:
                    self.restarts += 1
                    self._life += 1
