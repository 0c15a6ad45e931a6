"""How a run fails: Findings collects errors in its inputs, WatchedLearner notices a lost learner, and `tell` makes the
last message and the exit code."""

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

# Errors in a run's inputs. The checks are independent, and the errors of all are collected, so that none hides another.

Given = ParamSpec("Given")
Found = TypeVar("Found")


class Findings:
    """Collects the messages of WrongInput that checks raise. Other exceptions are not caught."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def of(self, check: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found | None:
        """The result of check(*args, **kwargs); None if it raised WrongInput, whose lines are then kept."""
        try:
            return check(*args, **kwargs)
        except WrongInput as error:
            self.lines += [line for line in str(error).splitlines() if line not in self.lines]
            return None

    def finish(self) -> None:
        """Raises WrongInput with all lines, if there are any."""
        if self.lines:
            raise WrongInput("\n".join(self.lines))


# The learner as the loop sees it: every call is watched, and its failure is raised as a LearnerError.

# Long calls, in which the learner reports progress (TrainerService.pulse). The others must only answer in time.
ADVANCES: tuple[Any, ...] = (TrainerService.step, TrainerService.score, TrainerService.rehearse)
MOST_S = 15.0  # most seconds between two looks at the learner


class LearnerError(RuntimeError):
    """A call of the learner failed. The learner's state is then not to be trusted, so no checkpoint of it is saved."""


class LearnerLost(LearnerError):
    """The learner's process died or hangs. A fresh process can continue from the last checkpoint."""


@contextmanager
def lost_as_it_starts() -> Iterator[None]:
    """Inside this block, the death or hang of a process of the learner is raised as LearnerLost; an exception in its
    constructor (StartFailed) is raised as it is."""
    try:
        yield
    except StartFailed:
        raise
    except (ActorDied, DeadlineExceeded) as error:
        raise LearnerLost(str(error)) from error


class WatchedLearner:
    """The learner's actor, with a watch over each call. It is itself an Actor.

    silence_s: seconds after which a process without an answer, or a step without progress, counts as hung
    (cluster.config.Deadlines).
    """

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
        """As Actor.call, but raises LearnerLost for ActorDied and DeadlineExceeded, LearnerError for RemoteError."""
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
        """Asks the learner for its pulse again and again; ends only by raising LearnerLost, if the learner hangs. A
        call that ends before the first look costs nothing."""
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
                        answered = False  # if the process died, the call that is watched raises the reason
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
    """A run ends before its last step for a reason that the text states fully, so that no traceback is printed."""


def first_of(error: BaseException) -> BaseException:
    """The most telling exception in a group: the loss of the cluster, which causes other exceptions, else the first."""
    found = list(_leaves(error))
    return next((leaf for leaf in found if isinstance(leaf, ClusterLost)), found[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


def sentence_of(error: BaseException, again: str = GOES_ON) -> str:
    """A sentence for the user: the first line of the error's text. Built-in exceptions, whose texts do not stand alone,
    get their type in front. again: the next step for the user, after an error of the disk."""
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
    """The text to print when an error ends a command, with a traceback where the sentence may not say all; and the exit
    code, which is 2 if a process refused what the configuration gave it, else 1. again: as in `sentence_of`."""
    told = isinstance(error, RunEnded | LearnerLost | ClusterLost | WriteFailed | FolderGone)
    told = told or _is_of_a_full_disk(error) or (isinstance(error, StartFailed) and error.says_all)
    story = "" if told else "".join(traceback.format_exception(error))
    wrong_input = isinstance(error, StartFailed) and error.wrong_input
    return f"{story}error: {sentence_of(error, again)}", 2 if wrong_input else 1
