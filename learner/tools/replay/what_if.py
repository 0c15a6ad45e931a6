"""Other settings on the recorded completions: what would the same data have taught?"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from learner.config import RunConfig
from learner.tools.replay.changes import Changes, computes_elsewhere, rescored
from learner.tools.replay.folder import ReplayFolder
from learner.tools.replay.recorded import Step
from learner.tools.replay.scoring import scoring
from learner.tools.replay.taking import Learner, Taken

FAR = 1e-2  # nats a token, where guard.mismatch_k3 is null


@dataclass(frozen=True, slots=True)
class Question:
    """run: the folder that is replayed. config: of the replay. start: checkpoint to begin from. place: where the answer
    is written."""

    run: Path
    config: RunConfig
    changes: Changes
    steps: Sequence[Step]
    start: Path | None
    place: Path


async def answer(question: Question, told: Callable[[Taken], None]) -> int | None:
    """Takes the steps, and writes the folder. The first step, if there is one, in which the policy was further from the
    one that sampled than `bound_of` allows."""
    config, changes = question.config, question.changes
    facts = {
        "of": str(question.run.resolve()),
        "from": question.steps[0].number - 1,
        "to": question.steps[-1].number,
        "changed": {key: {"run": then, "replay": now} for key, (then, now) in changes.items()},
    }
    far: int | None = None
    async with AsyncExitStack() as stack:
        given = await stack.enter_async_context(scoring(config)) if rescored(changes) else None
        learner = Learner(config, question.start, scoring=given, as_recorded=not computes_elsewhere(changes))
        folder = stack.enter_context(ReplayFolder(question.place, config, facts, rescored=given is not None))
        taking: AsyncGenerator[Taken, None] = learner.take(question.steps)
        async for taken in taking:
            folder.add(taken)
            told(taken)
            if far is None and taken.metrics.get("policy/mismatch_k3", 0.0) > bound_of(config):
                far = taken.step.number
        await folder.finish(learner)
    return far


def bound_of(config: RunConfig) -> float:
    """Nats a token, of `policy/mismatch_k3`: beyond it a run is stopped by its guard."""
    return config.guard.mismatch_k3 or FAR
