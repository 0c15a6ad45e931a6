"""What is said of a run that failed: one sentence, last, where the eye is; and the exit code."""

import traceback
from collections.abc import Iterator
from typing import TypeGuard

from cluster.actor import ClusterLost, StartFailed
from cluster.files import FULL, WriteFailed, lacks
from cluster.telemetry import FolderGone
from learner.driver.watched_learner import LearnerLost

AGAIN = "start the same command again"
GOES_ON = f"{AGAIN}: it goes on from the last checkpoint"


class RunEnded(RuntimeError):
    """Why a run ends before its last step, where the sentence says all and a traceback would say nothing more."""


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
