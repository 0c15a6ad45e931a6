"""The learner as the loop sees it: every call is watched, and a failure says that it was the learner's."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from cluster.actor import Actor, ActorDied, DeadlineExceeded, Method, P, RemoteError, StartFailed, T
from cluster.deadline import within
from learner.trainer.service import TrainerService

# Long calls, whose progress the learner reports (TrainerService.pulse); the others have only their deadline.
ADVANCES: tuple[Any, ...] = (TrainerService.step, TrainerService.score, TrainerService.rehearse)
MOST_S = 15.0  # between two looks


class LearnerError(RuntimeError):
    """A call of the learner failed: its state is not to be trusted, so it is not saved."""


class LearnerLost(LearnerError):
    """The learner's process died or hangs; another one can go on from the last checkpoint."""


@contextmanager
def lost_as_it_starts() -> Iterator[None]:
    """Inside this block a process of the learner that dies or hangs is the learner's loss; an error in one is not."""
    try:
        yield
    except StartFailed:
        raise
    except (ActorDied, DeadlineExceeded) as error:
        raise LearnerLost(str(error)) from error


class WatchedLearner:
    """An Actor around the learner's. silence_s: a process that does not answer for so long, or a step without progress
    for so long, counts as hung (cluster.deadlines.heartbeat)."""

    def __init__(self, actor: Actor[TrainerService], silence_s: float) -> None:
        self.actor, self._silence_s = actor, silence_s
        self.name = actor.name

    async def call(
        self,
        method: Method[TrainerService, P, T],
        deadline_s: float,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """As Actor.call, but raises LearnerLost or LearnerError."""
        work = asyncio.ensure_future(self.actor.call(method, deadline_s, *args, **kwargs))
        watch = asyncio.ensure_future(self._watch(method))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            return await (work if work.done() else watch)
        except (ActorDied, DeadlineExceeded) as error:
            raise LearnerLost(str(error)) from error
        except RemoteError as error:
            raise LearnerError(str(error)) from error
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _watch(self, method: Callable[..., Any]) -> NoReturn:
        """Ends only by raising LearnerLost. A call that ends before the first look costs nothing."""
        every = min(self._silence_s / 4, MOST_S)
        before: float | None = None
        answered = False
        try:
            async with within(self._silence_s) as silence:
                while True:
                    await asyncio.sleep(every)
                    try:
                        pulse = await self.actor.call(TrainerService.pulse, every)
                    except (ActorDied, DeadlineExceeded):
                        answered = False  # if it died, the call itself says so, and of what
                        continue
                    answered = True
                    if pulse != before or method not in ADVANCES:
                        before = pulse
                        silence.restart()
        except TimeoutError:
            what = "has not got on" if answered else "is without an answer, and so is its process,"
            raise LearnerLost(
                f"{self.name}: {method.__name__} {what} for {self._silence_s:.0f} s: it hangs (py-spy dump tells "
                f"where; raise cluster.deadlines.heartbeat={self._silence_s:g} if one micro-batch may take longer)"
            ) from None
