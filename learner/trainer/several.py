"""Trainers of several runs on one base model, in one process and on one thread (gleaner sweep).

Each run has an adapter, an optimizer and a policy version of its own. Their work is done one piece after the other.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from cluster.actor import Several, Shared, stays_there
from learner.trainer.service import Exported
from learner.trainer.trainer import Trainer
from rollout.delivery import Answer
from rollout.types import SentPolicy

TRIAL = [*range(1, 33)]  # token ids on which a policy is tried before the driver has given others


class Trainers(Several[Trainer]):
    """The trainers of several runs: TrainerService, each of whose methods takes the number of a run first.

    make: (number of the run, the trainer of run 0 or None for run 0 itself) -> the trainer of the run, for each run.
    """

    def __init__(self, make: Sequence[Callable[[int, Trainer | None], Trainer]]) -> None:
        first = make[0](0, None)
        first.share_thread()
        super().__init__([first, *(one(number, first) for number, one in enumerate(make[1:], 1))])
        self._tried = [TRIAL for _ in make]  # of each run, the token ids of its newest probe

    async def step(self, run: int, groups: list[pa.Table]) -> dict[str, float]:
        """See TrainerService.step."""
        trainer = self.objects[run]
        try:
            return await trainer.step(groups)
        finally:
            await trainer.drop_gradients()  # else those of all runs would be held at the same time

    async def probe(self, run: int, token_ids: list[int]) -> Answer:
        """See TrainerService.probe."""
        self._tried[run] = token_ids
        return await self.objects[run].probe(token_ids)

    @stays_there
    async def outgoing(self, run: int, stays: bool = False) -> tuple[Shared[SentPolicy], Exported]:
        """See TrainerService.outgoing. Raises RuntimeError for a policy whose logprobs are not finite: the engine,
        which all runs share, must not get it."""
        trainer = self.objects[run]
        answer = await trainer.probe(self._tried[run])
        if not np.isfinite(answer.logprobs).all():
            raise RuntimeError(
                f"policy v{trainer.version}: its logprobs must be finite, {np.isfinite(answer.logprobs).sum()} of "
                f"{len(answer.logprobs)} are; lower learner.learning_rate, or learner.optimizer.max_grad_norm"
            )
        return await trainer.outgoing(stays)

    async def pulse(self, run: int) -> float:
        """See TrainerService.pulse. A step of one run waits for those of the others, so it is the sum over all runs."""
        return sum([await trainer.pulse() for trainer in self.objects])
