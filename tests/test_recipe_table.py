"""docs/recipes.md is what the plan of the recipes finds."""

import pytest

from tests.recipe_table import DOCUMENT, TABLE, table


@pytest.mark.long
def test_the_table_of_recipes_is_the_plan_s() -> None:
    found = TABLE.search(DOCUMENT.read_text())
    assert found is not None
    assert found[0] == table(), "the plan has changed: python -m tests.recipe_table, and look at the diff"
