"""What is wrong with a run's inputs: independent checks, each of whose errors is kept, so that none hides another."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class PreflightError(ValueError):
    """Inputs of the run are wrong; the text has one line per mistake."""


class Findings:
    """Collects the errors of the kinds that say what is wrong with an input; any other goes its way."""

    def __init__(self, kinds: tuple[type[Exception], ...]) -> None:
        self.lines: list[str] = []
        self._kinds = kinds

    def of(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What a check returns; None where it found something wrong."""
        try:
            return check(*args, **kwargs)
        except self._kinds as error:
            self.lines += [line for line in str(error).splitlines() if line not in self.lines]
            return None

    def finish(self) -> None:
        """Raises PreflightError if anything was found."""
        if self.lines:
            raise PreflightError("\n".join(self.lines))
