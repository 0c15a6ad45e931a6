"""What an actor is to its caller: calls with a deadline, the ways to fail, and values on their way to several."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Shared(Generic[T]):
    """An argument for calls of several actors, whose methods get the value itself.

    Between processes it is serialised once, by the first call; `handle` is that copy, in the object store.
    """

    value: T
    handle: Any = None

    def forget(self) -> None:
        """Frees the copy, once the calls that are under way have it; a later call makes another."""
        self.handle = None


class ActorDied(RuntimeError):
    """The process behind an actor ended, or is of no use any more: what was in flight on it is lost.

    reason: what ended it, in the words of the exception that did; None if it was killed or ended without a word.
    """

    def __init__(self, text: str, reason: str | None = None) -> None:
        super().__init__(text)
        self.reason = reason


class StartFailed(ActorDied):
    """The constructor raised; the text is the actor's name and the exception's own sentence.

    wrong_input: it refused what it was given, so that another try will end alike.
    """

    def __init__(self, text: str, reason: str, wrong_input: bool) -> None:
        super().__init__(text, reason)
        self.wrong_input = wrong_input


class DeadlineExceeded(RuntimeError):
    """A call gave no answer in time; the text names actor, method, seconds and last sign of life."""


class RemoteError(RuntimeError):
    """A method raised; the text holds the remote traceback."""


class ClusterLost(RuntimeError):
    """One of Ray's own processes ended, and the run's processes with it; the text says which and what to do."""


class Unusable(RuntimeError):
    """Raised by a method of an actor's object that cannot go on: its process must be replaced (ActorDied there)."""


class Actor(Protocol):
    """One end of a process border."""

    name: str

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        """Runs `await object.method(*args)`, with what is Shared by value; ActorDied, DeadlineExceeded, RemoteError."""

    async def revive(self, deadline_s: float) -> None:
        """Puts a fresh process (state as after construction) in the place of this one, which is killed if it still
        runs, and waits for its constructor; ActorDied, StartFailed, DeadlineExceeded."""

    async def kill(self) -> None:
        """Ends the process for good."""


class Local:
    """The same interface over an object in this process: logic tests and runs without a cluster."""

    def __init__(self, name: str, factory: Callable[..., Any], args: Sequence[Any]) -> None:
        self.name = name
        self._make = lambda: factory(*args)
        self._object = self._make()

    async def call(self, method: str, *args: Any, deadline_s: float) -> Any:
        try:
            async with asyncio.timeout(deadline_s) as limit:
                values = [arg.value if isinstance(arg, Shared) else arg for arg in args]
                return await getattr(self._object, method)(*values)
        except Unusable as error:
            raise ActorDied(f"{self.name}: {error}", reason=str(error)) from error
        except TimeoutError:
            if not limit.expired():  # the method's own
                raise
            raise DeadlineExceeded(f"{self.name}: {method} gave no answer within {deadline_s:g} s") from None

    async def revive(self, deadline_s: float) -> None:
        self._object = self._make()

    async def kill(self) -> None:
        self._object = None
