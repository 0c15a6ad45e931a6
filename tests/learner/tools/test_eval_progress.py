"""What a person sees of an evaluation that goes on."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from learner.tools.eval_command import EvalProgress


def test_without_a_terminal_a_line_every_ten_seconds_says_how_long_it_will_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = io.StringIO()
    with EvalProgress(Console(file=said, width=200)) as progress:
        progress.note("problems: 100")
        for second, more in ((100, 0), (104, 50), (110, 50), (112, 20), (125, 280)):
            monkeypatch.setattr(time, "monotonic", lambda second=second: float(second))
            progress.done(more, 400)
    assert said.getvalue().splitlines() == [
        "problems: 100",
        "completions 100 of 400, 30 s left",  # after 10 s
        "completions 400 of 400, 0 s left",
    ]


def test_on_a_terminal_it_is_a_bar_that_goes_away() -> None:
    said = io.StringIO()
    with EvalProgress(Console(file=said, width=200, force_terminal=True)) as progress:
        progress.done(0, 40)
        progress.done(10, 40)
        progress.note("generator-0: a fresh process")
    text = said.getvalue()
    assert "10/40" in text
    assert "generator-0: a fresh process" in text
    assert text.rpartition("\n")[2].endswith("\x1b[2K")  # the line of the bar is empty again


def test_an_evaluation_that_fails_before_it_begins_has_no_bar() -> None:
    said = io.StringIO()
    with pytest.raises(ValueError, match="no room"), EvalProgress(Console(file=said, force_terminal=True)):
        raise ValueError("no room")
    assert said.getvalue() == ""
