"""How one process calls an object in another: the Actor interface, whose calls have a deadline; the errors that a call
can raise; and Shared, an argument that is serialised once for several calls.

cluster.ray_actor implements the interface with Ray, and Local here in the same process, so the code that calls an actor
runs with and without Ray.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

# Deadlines count only seconds in which this process could run.
#
# A whole run can be stopped and resumed: a paused container or machine, SIGSTOP to all of its processes, Ctrl-Z, a
# terminal that takes no more output. On the wall clock every deadline has then passed, although the process that was
# asked was stopped too. So the time in which this process was stopped is not counted. (While a machine sleeps, Linux's
# monotonic clock itself stops.) The clock is read once a second; a late reading shows that the process was stopped.

LOOK_S = 1.0  # between two readings of the clock
LATE_S = 1.0  # a busy machine delays a reading by at most this; a longer delay means that the process was stopped
WAKE_S = 10.0  # after a stop at least these seconds are left, for other processes to wake and answer


class Awake:
    """A countdown of `seconds` that stops while this process is stopped. `left` must be called at least every LOOK_S
    seconds.

    Attributes:
        lost: seconds so far in which this process was stopped.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds
        self._seen, self.lost = time.monotonic(), 0.0

    def left(self) -> float:
        """Returns the seconds that are left, 0 or less once all have passed."""
        now = time.monotonic()
        passed, self._seen = now - self._seen, now
        if passed > LOOK_S + LATE_S:
            self.lost += passed
            self._left = max(self._left, min(self._seconds, WAKE_S))
        else:
            self._left -= passed
        return self._left


def within(seconds: float | None) -> "Deadline":
    """Like asyncio.timeout, but counts with Awake: raises TimeoutError in a body that takes longer than `seconds`. None
    or infinity: no limit."""
    return Deadline(math.inf if seconds is None else seconds)


class Deadline:
    """The asynchronous context manager that `within` returns."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._clock = seconds, Awake(seconds)
        self._timeout = asyncio.timeout(None)
        self._look: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self.restart()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        await self._timeout.__aexit__(kind, error, trace)

    def restart(self) -> None:
        """Starts the countdown again with all seconds."""
        self._stop()
        self._clock = Awake(self._seconds)
        self._wait(self._seconds)

    def expired(self) -> bool:
        """Whether the seconds have passed. If not, a TimeoutError was raised by the body itself."""
        return self._timeout.expired()

    def stood_still(self) -> bool:
        """Whether this process was stopped since the countdown began."""
        self._clock.left()
        return self._clock.lost > 0

    def _wait(self, left: float) -> None:
        if left < math.inf:
            self._look = asyncio.get_running_loop().call_later(min(left, LOOK_S), self._looked)

    def _looked(self) -> None:
        left = self._clock.left()
        if left > 0:
            self._wait(left)
        else:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def _stop(self) -> None:
        if self._look is not None:
            self._look.cancel()


T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)  # the protocol of the object that an actor holds
P = ParamSpec("P")
Method = Callable[Concatenate[S, P], Awaitable[T]]  # an unbound method of a protocol S, such as `Service.method`


@dataclass(eq=False, slots=True)
class Shared(Generic[T]):
    """An argument that is serialised once for calls of several actors; their methods get the value itself.

    value: the value; None in a process that never had it (stays_there). handle: the serialised copy in Ray's object
    store; None before the first call to another process.
    """

    value: T | None
    handle: Any = None

    def argument(self) -> T:
        """Returns this Shared, typed as the value that the called method gets."""
        return cast(T, self)


def stays_there(method: F) -> F:
    """Marks a service's method that returns a pair of a Shared and another value. When the service is in another
    process the shared value stays in the object store of that node, and the caller gets a Shared with its handle
    only."""
    method.__dict__["stays_there"] = True
    return method


class ActorDied(RuntimeError):
    """The process behind an actor ended, or is of no use any more: what was in flight on it is lost. Who owns it starts
    a fresh one (rollout.producer, learner.ranks, learner.driver.launch); of the learner it becomes LearnerLost.

    reason: the exception, crash message or exit code that ended it; None if it was killed or the cause is unknown.
    """

    def __init__(self, text: str, reason: str | None = None) -> None:
        super().__init__(text)
        self.reason = reason


class StartFailed(ActorDied):
    """The constructor raised; the text is the actor's name and the exception's own sentence. It would again: whoever
    starts fresh processes lets it pass (rollout.producer only if it refused its input).

    wrong_input: the constructor refused its arguments, so another try would fail in the same way. says_all: the
    exception's text is complete for a user without a traceback; the text is then that text alone.
    """

    def __init__(self, text: str, reason: str, wrong_input: bool, *, says_all: bool = False) -> None:
        super().__init__(text, reason)
        self.wrong_input, self.says_all = wrong_input, says_all


class DeadlineExceeded(RuntimeError):
    """A call gave no answer in time; the text names actor, method, seconds and last sign of life. Who owns the process
    kills it, as it hangs, and starts a fresh one."""


class ValueLost(RuntimeError):
    """What an argument stands for (Shared) is gone with the node that had it, before the method got it. The run begins
    once more from its last checkpoint (learner.driver.launch)."""


class RemoteError(RuntimeError):
    """A method raised; the text holds the remote traceback. Of the learner it becomes LearnerError."""


class ClusterLost(RuntimeError):
    """One of Ray's own processes ended, and the run's processes with it; the text says which and what to do.
    learner.driver.failure tells it first and without a traceback, and learner.main ends at once."""


class Unusable(RuntimeError):
    """A method of an actor's object raises this when its process must be replaced; the caller gets ActorDied."""


class Actor(Protocol[S_co]):
    """The caller's handle of an object that may be in another process: `await actor.call(Service.method, seconds,
    *args)`. The type argument is the protocol of the object's methods."""

    @property
    def name(self) -> str:
        """The name for messages and logs, such as generator-0."""

    async def call(
        self,
        method: Method[S_co, P, T],
        deadline_s: float,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Calls the object's method with the name of `method` and returns its result. A Shared argument arrives as its
        value.

        Raises ActorDied, DeadlineExceeded, RemoteError, ValueLost, cluster.files.WriteFailed.
        """


class RevivableActor(Actor[S_co], Protocol[S_co]):
    """An Actor whose process can be replaced, and whose end can be awaited."""

    async def revive(self, deadline_s: float) -> None:
        """Kills the process if it still runs, starts a fresh one with a newly constructed object, and waits for the
        constructor. Raises ActorDied, StartFailed, DeadlineExceeded."""

    async def until_ended(self, silence_s: float) -> None:
        """Never returns. Raises ActorDied as soon as the process ends, and DeadlineExceeded once the process has not
        answered for `silence_s` seconds, which means that it hangs."""


# A process that several runs share, and what each run has of it (gleaner sweep).


class Several(Generic[S]):
    """Objects of one kind, one for each run. Each of their methods can be called here, with the number of the run
    first."""

    def __init__(self, objects: Sequence[S]) -> None:
        self.objects = objects

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(run: int, *args: Any, **kwargs: Any) -> Any:
            return await getattr(self.objects[run], name)(*args, **kwargs)

        return call


class SharedProcess:
    """A process with Several objects. `of_run` gives the actor of each run's object.

    If the process is lost, it is lost for all runs: the first that asks for a fresh one starts it, and the others get
    the same.

    lives: number of processes that were started in its place.
    """

    def __init__(self, actor: RevivableActor[Any]) -> None:
        self.actor, self.lives = actor, 0
        self._revival: asyncio.Task[None] | None = None

    def of_run(self, run: int) -> "OfRun":
        """The actor of the object of run number `run`."""
        return OfRun(self, run)

    async def revive(self, life: int, deadline_s: float) -> int:
        """Starts a fresh process in place of number `life`, unless that was done already, and waits for it. Returns the
        number of the present process. Raises as RevivableActor.revive."""
        under_way = self._revival is not None and not self._revival.done()
        if life == self.lives and not under_way:
            self._revival = asyncio.create_task(self._revive(deadline_s))
        if self._revival is not None:
            await asyncio.shield(self._revival)  # the others wait for it even if this run ends
        return self.lives

    async def _revive(self, deadline_s: float) -> None:
        await self.actor.revive(deadline_s)
        self.lives += 1


class OfRun:
    """The RevivableActor of one run's object in a SharedProcess."""

    def __init__(self, process: SharedProcess, run: int) -> None:
        self.name = process.actor.name
        self._process, self._run, self._life = process, run, process.lives

    async def call(self, method: Any, deadline_s: float, /, *args: Any, **kwargs: Any) -> Any:
        """See Actor.call."""
        return await self._process.actor.call(method, deadline_s, self._run, *args, **kwargs)

    async def until_ended(self, silence_s: float) -> None:
        """See RevivableActor.until_ended."""
        await self._process.actor.until_ended(silence_s)

    async def revive(self, deadline_s: float) -> None:
        """See RevivableActor.revive, and SharedProcess.revive."""
        self._life = await self._process.revive(self._life, deadline_s)


class Local(Generic[S]):
    """A RevivableActor whose object is in this process, for tests and for runs without Ray."""

    def __init__(self, name: str, factory: Callable[..., S], args: Sequence[Any]) -> None:
        self.name = name
        self._make = lambda: factory(*args)
        self._object: S = self._make()

    async def call(self, method: Method[S, P, T], deadline_s: float, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            async with within(deadline_s) as limit:
                values = [arg.value if isinstance(arg, Shared) else arg for arg in args]
                answer: T = await getattr(self._object, method.__name__)(*values, **kwargs)
                return answer
        except Unusable as error:
            raise ActorDied(f"{self.name}: {error}", reason=str(error)) from error
        except TimeoutError:
            if not limit.expired():  # the method itself raised it
                raise
            raise DeadlineExceeded(f"{self.name}: {method.__name__} gave no answer within {deadline_s:g} s") from None

    async def until_ended(self, silence_s: float) -> None:
        await asyncio.Event().wait()

    async def revive(self, deadline_s: float) -> None:
        self._object = self._make()
