"""TrainError, and under it InputError (exit code 2 of the command line) and RunFailed (exit code 1)."""


class TrainError(Exception):
    """A call of `train`, `evaluate` or `plan` that did not do what it was asked; the text is the command line's."""


class InputError(TrainError, ValueError):
    """The settings or inputs are wrong: one line for each mistake, nothing was trained."""


class RunFailed(TrainError, RuntimeError):
    """The run failed after it had begun; the same call of `train` goes on from its last checkpoint."""
