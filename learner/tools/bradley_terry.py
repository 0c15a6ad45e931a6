"""Learns a reward model from preference pairs: an adapter with a scalar head s on a frozen base, under the model of
Bradley and Terry (1952) as RLHF uses it (Ouyang et al. 2203.02155, equation 1, with K = 2):

    loss = -log sigmoid(s(prompt, chosen) - s(prompt, rejected)), the mean over pairs.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from learner.batch.micro_batch import WholeBatch, whole_batches
from learner.batch.rows import Rows
from learner.config.settings import LearnerConfig, rate_factor
from learner.model.policy import Policy
from learner.tools.pairs import Pair, PairsError
from learner.trainer.memory_limit import OutOfMemory, TokenBudget
from learner.trainer.optimizer import Updater

ROLE = "reward"


class Judged(NamedTuple):
    """Of pairs: the share whose chosen answer has the higher score, the mean difference, and the mean loss."""

    accuracy: float
    margin: float
    loss: float


class PairLearner:
    """policy: with the role ROLE, which is trained; nothing else of it is. total_steps: for the schedule.

    adapter: what is learned. step: updates so far.
    """

    def __init__(
        self, policy: Policy, config: LearnerConfig, budget: TokenBudget, *, dtype: str, total_steps: int
    ) -> None:
        self.adapter = policy.scored[ROLE]
        assert self.adapter.masters is not None
        self._policy, self._masters, self._device = policy, self.adapter.masters, policy.head.device
        self._config, self._budget, self._total_steps = config, budget, total_steps
        self._updater = Updater(list(self._masters.named.values()), config, dtype=dtype, device=self._device)
        self.step = 0

    def learn(self, pairs: Sequence[Pair]) -> Judged:
        """One update; what the model said of these pairs before it.

        Raises PairsError: one of them does not fit in memory. FloatingPointError: loss or gradient is not finite.
        """
        differences = self._over(pairs, partial(self._gradient, count=len(pairs)))
        judged = _judged(differences)
        rate = self._config.learning_rate * rate_factor(self.step, self._total_steps, self._config.schedule)
        _, done = self._updater.step(rate, loss_is_finite=np.isfinite(judged.loss))
        if not done and not self._updater.may_overflow:
            raise FloatingPointError(
                f"step {self.step + 1}: loss or gradient is not finite; lower --learning-rate, or set --dtype float32"
            )
        self._masters.sync()
        self.step += 1
        return judged

    def judge(self, pairs: Sequence[Pair]) -> Judged:
        """What the model says now, without learning."""
        with torch.no_grad():
            return _judged(self._over(pairs, self._differences))

    def _over(self, pairs: Sequence[Pair], work: Callable[[Sequence[WholeBatch]], list[Tensor]]) -> Tensor:
        try:
            return torch.cat(self._budget.run(partial(self._plan, pairs), work))
        except OutOfMemory:
            longest = max(pair.longest for pair in pairs)
            raise PairsError(
                f"--max-length: two answers of {longest} tokens with their prompt must fit in memory, and do not; "
                "lower it, set --checkpointing full or --base nf4, or take a smaller model"
            ) from None

    def _plan(self, pairs: Sequence[Pair], tokens: int) -> list[WholeBatch]:
        """Micro-batches of whole pairs, the largest first; the chosen answer of each before the rejected one.

        Padded on a CPU, where attention goes through a packed row segment by segment: here these are many and short.
        """
        pad, packed = self.adapter.pad, self._policy.packed and self._device.type == "cuda"
        chunks = _chunks(sorted(pairs, key=lambda pair: -pair.longest), tokens)
        every = 2 * len(pairs) * max(pair.longest for pair in pairs)  # so that a chunk is not divided
        return [batch for chunk in chunks for batch in whole_batches(_rows(chunk), every, packed=packed, pad=pad)]

    def _gradient(self, batches: Sequence[WholeBatch], count: int) -> list[Tensor]:
        self._masters.clear_gradients()
        found = []
        with self._policy.acting_as(ROLE):
            for batch in batches:
                difference = self._difference(batch)
                loss = _loss(difference).sum() / count
                torch.autograd.backward(self._updater.scale(loss))
                self._masters.collect_gradients()
                found.append(difference.detach())
        return found

    def _differences(self, batches: Sequence[WholeBatch]) -> list[Tensor]:
        with self._policy.acting_as(ROLE):
            return [self._difference(batch) for batch in batches]

    def _difference(self, whole: WholeBatch) -> Float[Tensor, " pairs"]:
        batch, policy = whole.batch.to(self._device), self._policy
        hidden = policy.hidden(batch.ids, batch.positions, batch.layout)
        scores: Tensor = self.adapter.head(hidden[whole.ends.to(self._device)])
        places = torch.from_numpy(np.argsort(whole.rows)).to(self._device)
        chosen, rejected = scores[places].view(-1, 2).unbind(1)
        difference: Tensor = chosen - rejected
        return difference


def _loss(difference: Tensor) -> Tensor:
    """-log sigmoid of it."""
    return -F.logsigmoid(difference)


def _judged(differences: Tensor) -> Judged:
    wide = differences.double()
    return Judged(float((wide > 0).double().mean()), float(wide.mean()), float(_loss(wide).mean()))


def _chunks(pairs: Sequence[Pair], tokens: int) -> Iterator[list[Pair]]:
    """Neighbours, the longest first, of together at most so many tokens when padded, or one pair that has more."""
    chunk: list[Pair] = []
    for pair in pairs:
        if chunk and 2 * chunk[0].longest * (len(chunk) + 1) > tokens:
            yield chunk
            chunk = []
        chunk.append(pair)
    if chunk:
        yield chunk


def _rows(pairs: Sequence[Pair]) -> Rows:
    answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    tokens = np.array([token for answer in answers for token in answer], np.int32)
    return Rows(
        rewards=[],
        prompts=[np.array(pair.prompt, np.int32) for pair in pairs for _ in range(2)],
        completions=tokens,
        behavior=np.zeros(len(tokens), np.float32),
        versions=tokens,
        lengths=np.array([len(answer) for answer in answers]),
        truncated=np.zeros(len(answers), np.bool_),
    )
