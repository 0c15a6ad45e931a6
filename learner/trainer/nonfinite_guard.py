"""What ends a run whose loss or gradient is not finite step after step."""

from collections.abc import Mapping

from learner.trainer.update import ROLES

MAX_IN_A_ROW = 3  # updates that were skipped


class NonFiniteGuard:
    """in_a_row: steps so far of which every update was skipped."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def after(self, failed: str | None, metrics: Mapping[str, float], *, may_overflow: bool, step: int) -> None:
        """After each step. RuntimeError at the third in a row that was skipped.

        failed: the role all of whose updates were skipped (learner.trainer.update.ROLES); None: there is none.
        may_overflow: the loss scale of float16, not the model, may be to blame: an overflow halves it, and is no fault
        of the run until the scale is down to 1.
        """
        self.in_a_row = self.in_a_row + 1 if failed and not may_overflow else 0
        if failed and self.in_a_row >= MAX_IN_A_ROW:
            names = ROLES[failed]
            raise RuntimeError(
                f"loss/skipped_nonfinite: the {failed}'s loss and gradient norm must be finite, they were not in "
                f"{self.in_a_row} steps in a row (last: step {step}, {names.loss} {metrics[names.loss]}, {names.norm} "
                f"{metrics[names.norm]}); the weights are those before them. Lower {names.rate}, or look at the last "
                "steps' rollouts"
            )
