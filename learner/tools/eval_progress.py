"""How far an evaluation is: a bar on a terminal, else a line now and then. On standard error, which holds no result."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from learner.driver.console import duration

EVERY_S = 10.0  # seconds between two lines


class EvalProgress:
    """Context manager; `note` prints a line, `done` counts completions."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._count = 0
        self._began = self._told = 0.0  # seconds of time.monotonic

    def __enter__(self) -> "EvalProgress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def note(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def done(self, more: int, total: int) -> None:
        """So many more completions are there, of so many in all; 0 as their generation begins."""
        now = time.monotonic()
        if more == 0:
            self._begin(now, total)
        self._count += more
        if self._bar is not None:
            self._bar.update(self._task, advance=more)
        elif more and now - self._told >= EVERY_S:
            self._told = now
            left = duration((now - self._began) * (total - self._count) / self._count)
            self.note(f"completions {self._count} of {total}, {left} left")

    def _begin(self, now: float, total: int) -> None:
        self._began = self._told = now
        if self._console.is_terminal:
            columns = TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()
