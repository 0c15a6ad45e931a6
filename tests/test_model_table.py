"""docs/model_tables.md says what the code does now."""

from __future__ import annotations

from typing import Any

import pytest

from examples.random_families import TINY
from rollout.architecture import has_states
from tests.model_rows import ROWS
from tests.model_table import DOCUMENT, OWN_NAMES, table


@pytest.mark.long
def test_the_table_of_models_is_what_the_code_says() -> None:
    pytest.importorskip("vllm")
    assert DOCUMENT.read_text() == table(), "the models have changed: python -m tests.model_table, and look at the diff"


@pytest.mark.long
def test_models_with_a_state_are_those_that_vllm_takes_for_such() -> None:
    pytest.importorskip("vllm")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES
    from vllm import ModelRegistry

    hf: Any = transformers
    found, wanted = set(), set()
    for kind, settings in ROWS.items():
        entry = ModelRegistry.models.get(CLASSES[kind])
        if entry is not None:
            own = settings if kind in OWN_NAMES else TINY | settings
            found |= {kind} if has_states(hf.AutoConfig.for_model(kind, **own).to_dict()) else set()
            wanted |= {kind} if getattr(entry.load_model_cls(), "has_inner_state", False) else set()
    assert found == wanted
    assert len(wanted) > 5
