"""docs/models.md says what the code does now."""

from __future__ import annotations

import pytest

from tests.model_table import DOCUMENT, table


@pytest.mark.long
def test_the_table_of_models_is_what_the_code_says() -> None:
    pytest.importorskip("vllm")
    assert DOCUMENT.read_text() == table(), "the models have changed: python -m tests.model_table, and look at the diff"
