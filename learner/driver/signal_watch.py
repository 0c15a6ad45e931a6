"""Whether the rewards of a run's last steps differ within groups: where they do not, nothing is learned."""

from collections import deque
from collections.abc import Mapping

ALIKE = "reward/zero_variance_groups"
STEPS = 10  # a few steps without a difference are usual
LEAST = 3  # of a run that ended before
SHARE = 0.9  # of the groups of these steps, from which on it is worth a line


class SignalWatch:
    """Counts the groups whose completions all scored alike, over the last steps."""

    def __init__(self, groups_per_step: int) -> None:
        self._groups = groups_per_step
        self._alike: deque[float] = deque(maxlen=STEPS)
        self._reward = float("nan")
        self._said = False

    def add(self, metrics: Mapping[str, float]) -> str | None:
        """One more step. The sentence of `advice`, once in a run, as soon as STEPS steps say it. PPO has no such
        metric, and learns from one completion alone."""
        if ALIKE not in metrics:
            return None
        self._alike.append(metrics[ALIKE])
        self._reward = metrics["reward/mean"]
        if self._said or len(self._alike) < STEPS or (found := self.advice()) is None:
            return None
        self._said = True
        return found

    def advice(self) -> str | None:
        """One sentence, or None where groups differ or there were too few steps to say."""
        steps, groups = len(self._alike), len(self._alike) * self._groups
        if steps < LEAST or sum(self._alike) < SHARE * groups:
            return None
        return (
            f"in {sum(self._alike):.0f} of the {groups} groups of the last {steps} steps all completions have the same "
            f"reward (mean {self._reward:.3g}), and from such a group nothing is learned: the problems are too hard or "
            "too easy for the reward. Read some (gleaner rollouts show RUN); docs/learning.md has what to do"
        )
