"""The Ray end of an actor: a plain object made by `factory(*args)` in another process, and the handle to it.

Its `async def` methods take and return values. `Remote` and `cluster.actor.Local` have one interface, so the same loop
runs with and without a cluster.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cluster.actor import ActorDied, ActorRestarting, DeadlineExceeded, RemoteError, Shared


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it no garbage is collected by itself: imports make a million objects and no garbage, and to look for some
    in between took a fifth of a role's start."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Host:
    """The one Ray actor class: holds any object."""

    def __init__(self, factory: Callable[..., Any], args: Sequence[Any]) -> None:
        logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
        with uncollected():
            self._object = factory(*args)

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._object, method)(*args)

    async def ping(self) -> float:
        return time.time()


class Remote:
    """An object in another process."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle
        self._last_answer = time.monotonic()

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        sent = [_reference(arg) if isinstance(arg, Shared) else arg for arg in args]
        return await self._await(self._handle.call.remote(method, *sent), method, deadline_s)

    async def revive(self, hung: bool, deadline_s: float) -> None:
        if hung:  # Ray never notices a hung process; one that died it restarts by itself
            import ray

            ray.kill(self._handle, no_restart=False)
        give_up = time.monotonic() + deadline_s
        while True:
            try:
                return await self.ready(max(give_up - time.monotonic(), 1.0))
            except ActorRestarting:
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(0.5)  # Ray refuses calls while it restarts a process, instead of queueing them

    async def ready(self, deadline_s: float) -> None:
        """Waits for the constructor; its exception arrives as RemoteError."""
        await self._await(self._handle.ping.remote(), "start", deadline_s)

    async def kill(self) -> None:
        import ray

        ray.kill(self._handle)

    async def _await(self, ref: Any, method: str, deadline_s: float) -> Any:
        import ray

        try:
            async with asyncio.timeout(deadline_s):
                result = await ref
        except ray.exceptions.RayTaskError as error:  # first: that of a TimeoutError in there is a TimeoutError, too
            raise RemoteError(f"{self.name}: {method} failed: {_cause(error)}") from error
        except asyncio.CancelledError:  # nobody wants the answer any more; over there it is cancelled, too
            ray.cancel(ref)
            raise
        except TimeoutError:
            ray.cancel(ref)
            silent = time.monotonic() - self._last_answer
            raise DeadlineExceeded(
                f"{self.name}: {method} gave no answer within {deadline_s:g} s (last answer {silent:.0f} s ago)"
            ) from None
        except ray.exceptions.ActorUnavailableError as error:
            raise ActorRestarting(f"{self.name}: process died during {method}; it is being restarted") from error
        except ray.exceptions.RayActorError as error:
            raise ActorDied(f"{self.name}: process died during {method}: {error}") from error
        self._last_answer = time.monotonic()
        return result


def _reference(shared: Shared[Any]) -> Any:
    """What Ray replaces by the value where it arrives, as a direct argument of a call."""
    if shared.handle is None:
        import ray

        shared.handle = ray.put(shared.value)
    return shared.handle


def _cause(error: Any) -> str:
    """The exception itself first, then where it happened."""
    cause = getattr(error, "cause", None)
    return f"{type(cause).__name__}: {cause}\n{error}" if cause is not None else str(error)
