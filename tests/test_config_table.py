"""docs/keys.md says what the configuration's models say."""

import pytest

from learner.config.load import Key, keys
from tests.config_table import DOCUMENT, document, reason


def test_the_document_is_what_the_models_say() -> None:
    assert DOCUMENT.read_text() == document(), "keys have changed: python -m tests.config_table, then look at the diff"


@pytest.mark.parametrize("key", list(keys()), ids=lambda key: key.name)
def test_every_key_says_what_it_is(key: Key) -> None:
    said = reason(key)
    assert len(said) >= 20
    assert said.endswith(".")
    assert "|" not in said  # it would end the cell of the table
