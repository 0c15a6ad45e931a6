"""Work of one kind side by side, of which one failure ends all."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


async def side_by_side(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results, in order. The first error of any is raised, once the others are cancelled for it."""
    try:
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(one) for one in work]
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in begun]


@asynccontextmanager
async def alongside(work: Iterable[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Work without end goes on inside this block. The first error of any ends the block, and is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            begun = [tasks.create_task(one) for one in work]
            yield
            for task in begun:
                task.cancel()
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


class Room:
    """Places that are taken several at a time; first come, first served."""

    def __init__(self, places: int) -> None:
        self._places, self._free, self._line = places, asyncio.Semaphore(places), asyncio.Lock()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        """Inside this block so many places are taken, or all where there are fewer."""
        mine = 0
        try:
            async with self._line:  # else two of them could each wait for the places that the other has
                while mine < min(count, self._places):
                    await self._free.acquire()
                    mine += 1
            yield
        finally:
            for _ in range(mine):
                self._free.release()
