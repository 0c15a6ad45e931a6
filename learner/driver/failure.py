"""How a run fails: what is wrong with its inputs, a learner that is lost, and what is said last, with the exit code."""

import asyncio
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, ParamSpec, TypeGuard, TypeVar

from cluster.actor import (
    Actor,
    ActorDied,
    ClusterLost,
    DeadlineExceeded,
    Method,
    P,
    RemoteError,
    StartFailed,
    T,
    within,
)
from cluster.errors import WrongInput
from cluster.files import FULL, WriteFailed, lacks
from cluster.telemetry import FolderGone
from learner.trainer.service import TrainerService

# What is wrong with a run's inputs: independent checks, each of whose errors is kept, so that none hides another.

Given = ParamSpec("Given")
Found = TypeVar("Found")


class Findings:
    """Collects what is wrong with inputs; any other error goes its way."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def of(self, check: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found | None:
        """What a check returns; None where it found something wrong."""
        try:
            return check(*args, **kwargs)
        except WrongInput as error:
            self.lines += [line for line in str(error).splitlines() if line not in self.lines]
            return None

    def finish(self) -> None:
        """Raises WrongInput if anything was found."""
        if self.lines:
            raise WrongInput("\n".join(self.lines))


# The learner as the loop sees it: every call is watched, and a failure says that it was the learner's.

# Long calls, whose progress the learner reports (TrainerService.pulse); the others have only their deadline.
ADVANCES: tuple[Any, ...] = (TrainerService.step, TrainerService.score, TrainerService.rehearse)
MOST_S = 15.0  # between two looks


class LearnerError(RuntimeError):
    """A call of the learner failed: its state is not to be trusted, so the loop does not save it."""


class LearnerLost(LearnerError):
    """The learner's process died or hangs; learner.driver.launch starts another, which goes on from the last
    checkpoint."""


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
    for so long, counts as hung (cluster.config.Deadlines)."""

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
                f"where; raise cluster.patience if one micro-batch may take longer)"
            ) from None


AGAIN = "start the same command again"
GOES_ON = f"{AGAIN}: it goes on from the last checkpoint"


class RunEnded(RuntimeError):
    """Why a run ends before its last step, or a command on its way, where the sentence says all: `tell` and
    learner.tools.reported print it without a traceback."""


def first_of(error: BaseException) -> BaseException:
    """The exception of a group that tells most: the loss of the cluster, which causes others, else the first that
    came."""
    found = list(_leaves(error))
    return next((leaf for leaf in found if isinstance(leaf, ClusterLost)), found[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


def sentence_of(error: BaseException, again: str = GOES_ON) -> str:
    """Its first line; with the type, where that says more than a text which was not written to be read alone. again:
    what is to be done once a disk is mended."""
    if isinstance(error, WriteFailed):
        return f"{error.sentence()}, and {again}"
    if _is_of_a_full_disk(error):
        which = f"the disk of {error.filename}" if error.filename else "a disk"
        return f"{which} is full ({lacks(error)}); free some of it, and {again}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    bare = type(error).__module__ == "builtins" and not isinstance(error, RuntimeError | TimeoutError | ValueError)
    return f"{type(error).__name__}: {lines[0]}" if bare else lines[0]


def _is_of_a_full_disk(error: BaseException) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in FULL


def tell(error: BaseException, again: str = GOES_ON) -> tuple[str, int]:
    """All that is printed, with the traceback where it may say more, and the exit code: 2 if a process refused what the
    configuration gave it, else 1. again: as of `sentence_of`."""
    told = isinstance(error, RunEnded | LearnerLost | ClusterLost | WriteFailed | FolderGone)
    told = told or _is_of_a_full_disk(error) or (isinstance(error, StartFailed) and error.says_all)
    story = "" if told else "".join(traceback.format_exception(error))
    wrong_input = isinstance(error, StartFailed) and error.wrong_input
    return f"{story}error: {sentence_of(error, again)}", 2 if wrong_input else 1
