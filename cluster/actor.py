"""What an actor is to its caller: calls with a deadline, the ways to fail, and values on their way to several."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast

# Deadlines of which only such seconds count in which this process could run.
#
# A run that was stopped as a whole goes on when it wakes: a paused container or machine, SIGSTOP to all of its
# processes, Ctrl-Z, a terminal that takes no more output. By the clock all deadlines are over then, and by this one
# none is: whoever was asked has stood still as well. (While a machine sleeps, Linux's monotonic clock itself stands
# still.)
#
# A clock is looked at once a second; a look that comes late says that the process stood still meanwhile.

LOOK_S = 1.0
LATE_S = 1.0  # of a look on a busy machine; what is later stood still
WAKE_S = 10.0  # that are left at least after it did, for others to wake and answer


class Awake:
    """Seconds that pass while this process runs, as long as `left` is called every LOOK_S seconds or sooner.

    Attributes:
        lost: seconds so far in which it stood still.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds
        self._seen, self.lost = time.monotonic(), 0.0

    def left(self) -> float:
        """At most 0 once they have passed."""
        now = time.monotonic()
        passed, self._seen = now - self._seen, now
        if passed > LOOK_S + LATE_S:
            self.lost += passed
            self._left = max(self._left, min(self._seconds, WAKE_S))
        else:
            self._left -= passed
        return self._left


def within(seconds: float | None) -> "Deadline":
    """As asyncio.timeout by that clock: TimeoutError once the body has taken so many seconds; None, infinity: never."""
    return Deadline(math.inf if seconds is None else seconds)


class Deadline:
    """What `within` gives."""

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
        """All seconds are there again."""
        self._stop()
        self._clock = Awake(self._seconds)
        self._wait(self._seconds)

    def expired(self) -> bool:
        """Whether they have passed, so that the TimeoutError is this block's."""
        return self._timeout.expired()

    def stood_still(self) -> bool:
        """Whether this process did, meanwhile."""
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
S_co = TypeVar("S_co", covariant=True)  # the protocol of the object at the other end
P = ParamSpec("P")
Method = Callable[Concatenate[S, P], Awaitable[T]]  # of a service S, as in `Service.method`


@dataclass(eq=False, slots=True)
class Shared(Generic[T]):
    """An argument for calls of several actors, whose methods get the value itself.

    Between processes it is serialised once; `handle` is that copy, in the object store. value: None where it was never
    in this process (stays_there).
    """

    value: T | None
    handle: Any = None

    def argument(self) -> T:
        """This, with the type of what the method gets."""
        return cast(T, self)


def stays_there(method: F) -> F:
    """Marks a service's method that answers a Shared and something beside it: between processes the value stays in the
    object store of its node, and the caller gets its handle and what is beside it."""
    method.__dict__["stays_there"] = True
    return method


class ActorDied(RuntimeError):
    """The process behind an actor ended, or is of no use any more: what was in flight on it is lost. Who owns it starts
    a fresh one (rollout.producer, learner.ranks, learner.driver.launch); of the learner it becomes LearnerLost.

    reason: what ended it, in the words of the exception that did; None if it was killed or ended without a word.
    """

    def __init__(self, text: str, reason: str | None = None) -> None:
        super().__init__(text)
        self.reason = reason


class StartFailed(ActorDied):
    """The constructor raised; the text is the actor's name and the exception's own sentence. It would again: whoever
    starts fresh processes lets it pass (rollout.producer only if it refused its input).

    wrong_input: it refused what it was given, so that another try will end alike. says_all: the sentence is one for the
    user, to which a traceback would add nothing; the text is then that sentence alone.
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
    """Raised by a method of an actor's object that cannot go on: its process must be replaced (ActorDied there)."""


class Actor(Protocol[S_co]):
    """One end of a process border: `await actor.call(Service.method, seconds, *args)`."""

    @property
    def name(self) -> str:
        """For people."""

    async def call(
        self,
        method: Method[S_co, P, T],
        deadline_s: float,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Runs the object's method of that name with these arguments, what is Shared by value.

        Raises ActorDied, DeadlineExceeded, RemoteError, ValueLost, cluster.files.WriteFailed.
        """


class RevivableActor(Actor[S_co], Protocol[S_co]):
    """An actor whose process may be replaced."""

    async def revive(self, deadline_s: float) -> None:
        """Puts a fresh process (state as after construction) in the place of this one, which is killed if it still
        runs, and waits for its constructor; ActorDied, StartFailed, DeadlineExceeded."""

    async def until_ended(self, silence_s: float) -> None:
        """Waits for ever; ActorDied as soon as this process ends, DeadlineExceeded once it has given no answer for so
        long: it hangs."""


class Local(Generic[S]):
    """The same interface over an object in this process: logic tests and runs without a cluster."""

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
            if not limit.expired():  # the method's own
                raise
            raise DeadlineExceeded(f"{self.name}: {method.__name__} gave no answer within {deadline_s:g} s") from None

    async def until_ended(self, silence_s: float) -> None:
        await asyncio.Event().wait()

    async def revive(self, deadline_s: float) -> None:
        self._object = self._make()
