"""A task for a group that has ended: refused, and nothing is left that was never awaited."""

import asyncio
import inspect

import pytest

from learner.driver.loop import start_in


async def test_work_that_a_group_no_longer_takes_is_closed() -> None:
    async def work() -> int:
        return 3

    async with asyncio.TaskGroup() as tasks:
        assert await start_in(tasks, work()) == 3
    late = work()
    with pytest.raises(RuntimeError):
        start_in(tasks, late)
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
