"""When a run is done, and when it evaluates and saves: functions of the number of steps and of what was consumed."""

from learner.config import RunConfig
from rollout.data.cursor import Cursor


class Schedule:
    """total_steps: after which the run is done at the latest. problems: that may be consumed, of all epochs."""

    def __init__(self, config: RunConfig, total_steps: int, cursor: Cursor, problems: float) -> None:
        self.total_steps = total_steps
        self._config, self._cursor, self._problems = config, cursor, problems

    def done(self, step: int) -> bool:
        """No step is left: groups that were replaced, or had no reward, have used up problems of the epochs, too."""
        return step >= self.total_steps or self._cursor.consumed >= self._problems

    def evaluates(self, step: int) -> bool:
        """Every data.eval.every steps, and after the last."""
        return _due(step, self._config.data.eval.every) or self.done(step)

    def saves(self, step: int) -> bool:
        """Every checkpoint.every steps, and after the last."""
        return _due(step, self._config.checkpoint.every) or self.done(step)

    def early_end(self, step: int) -> str | None:
        """A sentence for the user if the problems are used up before the steps are done, else None."""
        if not self.done(step) or step >= self.total_steps:
            return None
        return (
            f"epochs: {self._cursor.consumed} problems were consumed by step {step}, since groups were replaced by "
            "dynamic sampling or had no reward: the run ends here"
        )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
