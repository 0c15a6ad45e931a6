"""Prints the progress of a sweep: a live table with a row for each run on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from learner.driver.console import COLUMNS, Progress, escaped

ACCURACY = "eval/accuracy"
SHOWN = ("reward", "accuracy", "tokens/s", "length", "mismatch", "train s")


class SweepProgress:
    """The progress of all runs: a context manager, inside of which the runs' RowProgress print.

    names: of the runs.
    """

    def __init__(self, names: Sequence[str], console: Console | None = None) -> None:
        self.console = console or Console()
        self._rows: dict[str, list[str]] = {name: ["waiting", *[""] * len(SHOWN)] for name in names}
        self._status = "starting"
        self._live: Live | None = None

    def __enter__(self) -> SweepProgress:
        if self.console.is_terminal:
            self._live = Live(self._picture(), console=self.console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._live = None

    def state(self, name: str, text: str) -> None:
        """Sets the first cell of a run's row, such as its step, or how it has ended."""
        self._rows[name][0] = text
        self._show()

    def row(self, name: str, where: str, cells: Mapping[str, str]) -> None:
        """Sets a run's row; a value that is not given stays, as accuracy between two evaluations."""
        before = dict(zip(SHOWN, self._rows[name][1:], strict=True))
        self._rows[name] = [where, *(cells.get(column) or before[column] for column in SHOWN)]
        self._show()

    def note(self, text: str) -> None:
        """Prints a line. On a terminal it goes above the table."""
        self._still_live()
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)
        self._status = text
        self._show()

    @property
    def live(self) -> bool:
        """Whether there is a table, so that steps need no lines."""
        return self._still_live()

    def _still_live(self) -> bool:
        """Whether there is a table. Ends it if the terminal has vanished, as Progress does."""
        if self._live is not None and not self.console.is_terminal:
            self.__exit__(None, None, None)
            self.console = Console(file=self.console.file)
            self.console.line()
        return self._live is not None

    def _show(self) -> None:
        if self._still_live():
            assert self._live is not None
            self._live.update(self._picture(), refresh=True)

    def _picture(self) -> Group:
        table = Table("run", "step", *SHOWN, title="gleaner sweep", title_justify="left")
        for name, row in self._rows.items():
            table.add_row(escaped(name), *row)
        return Group(table, Text(self._status))


class RowProgress(Progress):
    """The Progress of one run of a sweep: lines with its name in front, or a row of the table.

    evaluated: called when the run has an evaluation; set by whoever wants to know.
    """

    def __init__(self, name: str, total_steps: int, dtype: str, together: SweepProgress, evaluates: int) -> None:
        super().__init__(total_steps, dtype, together.console, evaluates)
        self._name, self._together = name, together
        self.evaluated: Callable[[], None] = _nothing

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sets the run's row, or prints a line."""
        cells = {name: form.format(metrics[key]) for name, (key, form) in COLUMNS.items() if key in metrics}
        where = f"{step}/{self.total_steps}"
        self._together.row(self._name, where, cells)
        if not self._together.live:
            words = " ".join(f"{name} {cells[name]}" for name in SHOWN if name in cells)
            self.note(f"step {where} {words}{self._left(step, metrics)}")
        if ACCURACY in metrics:
            self.evaluated()

    def ended(self, text: str) -> None:
        """Shows how the run has ended."""
        self._together.state(self._name, text)

    def note(self, text: str) -> None:
        """Prints a line with the run's name in front."""
        self._together.note(f"{self._name}: {text}")


def _nothing() -> None:
    """The default of RowProgress.evaluated."""
