"""The same settings again: whether each step leads to the policy that it led to, and to the same metrics."""

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from learner.tools.replay.recorded import Recorded, Step
from learner.tools.replay.taking import Learner, Taken

NOT_COMPARED = ("time/", "memory/")  # of the machine, not of the step


@dataclass(frozen=True, slots=True)
class Compared:
    """A step beside what the run recorded.

    Attributes:
        digests: of the policy that it led to: as recorded (None: the run recorded none), and now.
        metrics: those that differ: name -> value as recorded (None: none), and now.
    """

    step: int
    digests: tuple[str | None, str]
    metrics: dict[str, tuple[float | None, float]]

    @property
    def same_policy(self) -> bool:
        """Whether the digests agree, as far as there are two."""
        then, now = self.digests
        return then in (None, now)

    @property
    def same(self) -> bool:
        """Whether everything is as it was recorded."""
        return self.same_policy and not self.metrics


async def compared(learner: Learner, recorded: Recorded, steps: Sequence[Step]) -> AsyncGenerator[Compared, None]:
    """What the steps begin with, if the run recorded its digest; then each step, as it was taken again."""
    before = steps[0].number - 1
    if (then := recorded.policies.get(before)) is not None:
        yield Compared(before, (then.sha256, await learner.begun_with(steps)), {})
    async for taken in learner.take(steps):
        yield compare(taken)


def compare(taken: Taken) -> Compared:
    """One step. What was not finite is not in metrics.jsonl."""
    then = taken.step.metrics
    differing = {
        name: (then.get(name), value)
        for name, value in taken.metrics.items()
        if not name.startswith(NOT_COMPARED)
        and then.get(name) != value
        and not (name not in then and not math.isfinite(value))
    }
    policy = taken.step.policy
    return Compared(taken.step.number, (policy.sha256 if policy else None, taken.sha256), differing)
