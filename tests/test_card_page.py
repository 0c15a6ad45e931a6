"""docs/cards.md is what the planner finds."""

from tests.card_page import DOCUMENT, LONGEST_TABLE, SPARSE_TABLE, TABLE, longest_table, sparse_table, table


def test_the_table_of_cards_is_the_planner_s() -> None:
    found = TABLE.search(DOCUMENT.read_text())
    assert found is not None
    assert found[0] == table(), "the planner has changed: python -m tests.card_page, and look at the diff"


def test_the_table_of_models_with_experts_is_the_planner_s() -> None:
    found = SPARSE_TABLE.search(DOCUMENT.read_text())
    assert found is not None
    assert found[0] == sparse_table(), "the planner has changed: python -m tests.card_page, and look at the diff"


def test_the_table_of_the_longest_rows_is_the_planners() -> None:
    found = LONGEST_TABLE.search(DOCUMENT.read_text())
    assert found is not None
    assert found[0] == longest_table(), "the planner has changed: python -m tests.card_page, and look at the diff"
