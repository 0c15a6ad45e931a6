"""docs/losses.md says what the code does now."""

from __future__ import annotations

from tests.loss_table import DOCUMENT, table


def test_the_table_of_losses_is_what_the_code_says() -> None:
    assert DOCUMENT.read_text() == table(), "the losses have changed: python -m tests.loss_table, and look at the diff"
