"""The logprobs of completions under a teacher: TeacherServer computes them in the teacher's process, with an engine of
vLLM; Teacher asks for them in each rollout worker, and makes columns of a group of them."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.actor import Actor, Deadline, within
from cluster.errors import WrongInput
from rollout.engine import EngineDied, EngineSettings
from rollout.scorer import side_by_side
from rollout.types import Completion, TeacherLogprobs

log = logging.getLogger("rollout")

DIED = 70  # exit code of a process whose engine died, so that Ray starts another


class LogprobEngine(Protocol):
    """An engine with EngineSettings.prompt_logprobs (rollout.vllm.engine.VllmEngine)."""

    async def completion_logprobs(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> TeacherLogprobs:
        """The logprobs of a completion [T] behind its prompt [P]."""

    async def close(self) -> None:
        """Ends the engine."""


class TeacherService(Protocol):
    """The methods that rollout workers, on any node, call in the teacher's process, by cluster.actor.Actor.call."""

    async def completion_logprobs(
        self, prompt_ids: Sequence[int], completions: Sequence[NDArray[np.int32]]
    ) -> list[TeacherLogprobs] | str:
        """The logprobs of each completion [T] of a prompt [P]; the text of WrongInput instead of raising it. They are
        computed together, as far as there is room."""

    async def close(self) -> None:
        """Ends the engine."""


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """What the teacher's process is built from.

    engine: its settings. top: likeliest tokens that the learner wants at each place, of those that the policy has.
    vocabulary: ids of the policy's tokens are below it. silence_s: seconds in which the engine must give some answer,
    else it hangs. make_engine: makes the engine in the teacher's process.
    """

    engine: EngineSettings
    top: int
    vocabulary: int
    silence_s: float
    make_engine: Callable[[EngineSettings], LogprobEngine]


class TeacherServer:
    """The TeacherService in the teacher's process. If the engine dies or hangs it ends the process, since Ray replaces
    a process that ends, and repeats the calls that it had (Session.spawn)."""

    def __init__(self, spec: TeacherSpec) -> None:
        self._spec = spec
        self._engine = spec.make_engine(spec.engine)
        self._waits: set[Deadline] = set()

    async def completion_logprobs(
        self, prompt_ids: Sequence[int], completions: Sequence[NDArray[np.int32]]
    ) -> list[TeacherLogprobs] | str:
        limit = within(self._spec.silence_s)
        try:
            async with limit:
                self._waits.add(limit)
                found = await side_by_side(self._logprobs_of(prompt_ids, ids) for ids in completions)
            return [of_policy(one, self._spec.top, self._spec.vocabulary) for one in found]
        except WrongInput as error:  # the caller in another process would get RemoteError instead
            return str(error)
        except (EngineDied, TimeoutError) as error:
            said = f"it hangs: no answer within {self._spec.silence_s:g} s" if limit.expired() else str(error)
            log.error("the teacher's engine: %s; a fresh process takes the place of this one", said)
            os._exit(DIED)
        finally:
            self._waits.discard(limit)

    async def _logprobs_of(self, prompt_ids: Sequence[int], ids: NDArray[np.int32]) -> TeacherLogprobs:
        found = await self._engine.completion_logprobs(prompt_ids, ids.tolist())
        for wait in self._waits:  # the engine gets on, also for those that wait behind others
            wait.restart()
        return found

    async def close(self) -> None:
        await self._engine.close()


def of_policy(found: TeacherLogprobs, top: int, vocabulary: int) -> TeacherLogprobs:
    """The same with the `top` likeliest of the tokens that the policy has, whose ids are below `vocabulary`. A larger
    teacher often has a few rows more in its head, which stand for no token (padding).

    Raises WrongInput if it finds so many of those likely that less than `top` others are given.
    """
    known = found.top_ids < vocabulary
    if (known.sum(-1) < top).any():
        raise WrongInput(
            f"model.teacher: must find tokens of the policy likeliest, and among its {found.top_ids.shape[-1]} "
            f"likeliest at some place fewer than {top} have an id below {vocabulary}, as the policy's; give another "
            "teacher, or learner.loss.teacher_top=0"
        )
    kept = np.argsort(~known, axis=-1, kind="stable")[:, :top]
    return TeacherLogprobs(
        found.logprobs,
        np.take_along_axis(found.top_ids, kept, -1),
        np.take_along_axis(found.top_logprobs, kept, -1),
    )


@dataclass(frozen=True, slots=True)
class Teacher:
    """The teacher's process, for a rollout worker. deadline_s: seconds for a group; the answer comes late if the
    process is lost and started again. top: as TeacherSpec has it."""

    actor: Actor[TeacherService]
    top: int
    deadline_s: float

    async def columns(self, prompt_ids: Sequence[int], completions: Sequence[Completion]) -> dict[str, Sequence[Any]]:
        """The columns [G] of a group that hold the teacher's logprobs. Raises WrongInput, ActorDied, DeadlineExceeded,
        RemoteError."""
        said = await self.actor.call(
            TeacherService.completion_logprobs, self.deadline_s, prompt_ids, [one.token_ids for one in completions]
        )
        if isinstance(said, str):
            raise WrongInput(said)
        none = [None] * len(said)
        return {
            "teacher_logprobs": [one.logprobs for one in said],
            "teacher_top_ids": [one.top_ids.reshape(-1) for one in said] if self.top else none,
            "teacher_top_logprobs": [one.top_logprobs.reshape(-1) for one in said] if self.top else none,
        }
