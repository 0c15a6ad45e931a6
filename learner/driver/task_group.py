"""Tasks of a group that may be at its end already, by the error of another of its tasks."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def start_in(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """tasks.create_task(work). Raises RuntimeError, with the work closed, if the group takes no more: Python before
    3.13 leaves it open, and warns some time later of a coroutine that was never awaited."""
    try:
        return tasks.create_task(work)
    except RuntimeError:
        work.close()
        raise
