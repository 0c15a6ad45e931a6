"""Whether there is anything to learn from in a run's last steps: nothing where completions are cut off before they
answer, where no token is trained on, and where all completions score the same."""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from learner.config import RunConfig

CUT = "length"  # finish_reason of what rollout.max_completion_length cut off
STEPS = 10  # a few steps without a difference are usual
LEAST = 3  # of a run that ended before
NEARLY_ALL = 0.9  # of the completions, or groups, of these steps, from which on it is worth a line


class Signal(NamedTuple):
    """What the metrics of a step say. alike: groups whose completions all scored alike; None: PPO, which has no such
    metric, and learns from one completion alone. same: whether all completions of the step did."""

    truncated: float
    alike: float | None
    mean: float
    same: bool
    trained: float | None

    @classmethod
    def of(cls, metrics: Mapping[str, float | None]) -> "Signal":
        """Of a line of metrics.jsonl, whose values may be None."""
        mean = metrics.get("reward/mean")
        return cls(
            metrics.get("rollout/truncated") or 0.0,
            metrics.get("reward/zero_variance_groups"),
            float("nan") if mean is None else mean,
            metrics.get("reward/std") == 0.0,
            metrics.get("loss/trained_tokens"),
        )


class SignalWatch:
    """Looks at the last steps of a run."""

    def __init__(self, config: RunConfig) -> None:
        self._groups, self._longest = config.learner.groups_per_step, config.rollout.max_completion_length
        self._masks = config.learner.loss.mask_truncated
        self._last: deque[Signal] = deque(maxlen=STEPS)
        self._said: set[str] = set()

    def add(self, metrics: Mapping[str, float | None]) -> list[str]:
        """One more step. The sentences of `advice` that were not said yet, each once in a run: that completions are cut
        off after LEAST steps, that they score alike after STEPS."""
        self._last.append(Signal.of(metrics))
        enough = {"cut": LEAST, "untrained": LEAST, "alike": STEPS}
        found = {
            name: sentence
            for name, sentence in self._findings()
            if name not in self._said and len(self._last) >= enough[name]
        }
        self._said |= set(found)
        return [*found.values()]

    def advice(self) -> list[str]:
        """A sentence for each cause; none where there is signal, or there were too few steps to say."""
        return [sentence for _, sentence in self._findings()]

    def _findings(self) -> Iterator[tuple[str, str]]:
        """The cause first: what is cut off often scores alike, too."""
        steps = list(self._last)
        if not steps:
            return
        last = "the last step" if len(steps) == 1 else f"the last {len(steps)} steps"
        share = sum(step.truncated for step in steps) / len(steps)
        untrained = all(step.trained == 0 for step in steps)
        masked = self._masks and untrained and any(step.truncated > 0 for step in steps)
        if share >= NEARLY_ALL:
            left_out = ". learner.loss.mask_truncated leaves them out: no token was trained on" if masked else ""
            yield "cut", f"in {last} {share:.0%} of the completions {cut_off(self._longest)}{left_out}"
        elif masked and not self._alike(steps):
            told = (
                f"in {last} no token was trained on (loss/trained_tokens is 0): learner.loss.mask_truncated leaves out "
                f"what was cut off, {share:.0%} of the completions, and the others score alike; raise "
                f"rollout.max_completion_length={self._longest}, or set learner.loss.mask_truncated=false"
            )
            yield "untrained", told
        if self._alike(steps):
            yield "alike", self._of_alike(steps, last)

    def _alike(self, steps: list[Signal]) -> bool:
        """Whether nearly all groups are; in fewer steps than LEAST only if all completions have one reward."""
        if len(steps) < LEAST or steps[0].alike is None:
            return all(step.same for step in steps) and len({step.mean for step in steps}) == 1
        return sum(step.alike or 0.0 for step in steps) >= NEARLY_ALL * len(steps) * self._groups

    def _of_alike(self, steps: list[Signal], last: str) -> str:
        groups, mean = len(steps) * self._groups, f"{steps[-1].mean:.3g}"
        if steps[0].alike is None:
            what = f"in {last} all completions have the same reward ({mean}), so that no answer is better than another"
        else:
            alike = sum(step.alike or 0.0 for step in steps)
            what = (
                f"in {alike:.0f} of the {groups} groups of {last} all completions have the same reward (mean {mean}), "
                "and from such a group nothing is learned"
            )
        return (
            f"{what}: the problems are too hard or too easy for the reward. Read some (gleaner rollouts show RUN); "
            "docs/learning.md has what to do"
        )


def cut_off(longest: int) -> str:
    """What is said of completions that reached rollout.max_completion_length."""
    return (
        f"reached rollout.max_completion_length={longest} before they ended, and rewards read what was cut off: raise "
        "it, name what ends an answer in rollout.stop, or reward brevity (length)"
    )
