"""What ends a run whose loss or gradient is not finite step after step."""

MAX_IN_A_ROW = 3  # updates that were skipped


class NonFiniteGuard:
    """in_a_row: steps so far of which every update was skipped."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def after(self, *, skipped: bool, may_overflow: bool, step: int, loss: float, norm: float) -> None:
        """After each step. RuntimeError at the third in a row that was skipped.

        may_overflow: the loss scale of float16, not the model, may be to blame: an overflow halves it, and is no fault
        of the run until the scale is down to 1.
        """
        self.in_a_row = self.in_a_row + 1 if skipped and not may_overflow else 0
        if self.in_a_row >= MAX_IN_A_ROW:
            raise RuntimeError(
                "loss/skipped_nonfinite: loss and gradient norm must be finite, they were not in "
                f"{self.in_a_row} steps in a row (last: step {step}, loss {loss}, norm {norm}); the weights "
                "are those before them. Lower learner.learning_rate, or look at the last steps' rollouts"
            )
