"""The tokens that learner and generators are asked about, to prove that they have one policy."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from learner.algo.advantage import has_signal
from rollout.schema import ragged, rewards_of

TOKENS = 64
LIFE = 16  # versions that the same tokens are kept at least, since rollout.evidence compares answers to the same ones


class Probe:
    """Tokens of a prompt at first; then of a batch that was trained on, where the policy moves most.

    The same tokens are kept for several versions. The policy goes on moving on them after the step of their own batch:
    with Adam's beta_1 = 0.9, two thirds of what a batch changes come in the ten steps after it.
    """

    def __init__(self, prompt: Sequence[int], longest: int) -> None:
        self._length = min(TOKENS, longest)
        self.ids = self._filled(prompt)
        self._age: int | None = None  # versions since they are tokens of a batch

    def trained_on(self, groups: Sequence[pa.Table], settled: bool) -> None:
        """To be called after each step. settled: a frozen generator would have been found out by the present tokens."""
        signals = [group for group in groups if _teaches(rewards_of(group))]
        if self._age is not None:
            self._age += 1
        if signals and (self._age is None or (settled and self._age >= LIFE)):
            self._age, self.ids = 0, self._of(signals[0])

    def _of(self, group: pa.Table) -> tuple[int, ...]:
        """The end of the prompt and the beginning of the completion whose reward is farthest from the group's mean."""
        rewards = rewards_of(group)
        chosen = int(np.nanargmax(np.abs(rewards - np.nanmean(rewards))))
        completion = ragged(group, "completion_ids")[chosen][: self._length * 3 // 4]
        return self._filled([*ragged(group, "prompt_ids")[chosen].tolist(), *completion.tolist()][-self._length :])

    def _filled(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens, repeated up to the probe's length: a mean over a few tokens says little."""
        return tuple((list(tokens) * (self._length // len(tokens) + 1))[: self._length])


def _teaches(rewards: npt.NDArray[np.float64]) -> bool:
    """Whether the policy moves on a group: its rewards differ, or it is one completion alone, which PPO learns from."""
    return has_signal(rewards) or (len(rewards) == 1 and bool(np.isfinite(rewards[0])))
