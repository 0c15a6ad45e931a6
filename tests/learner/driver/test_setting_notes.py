"""What may mean something else than the user believes is told before a run; what is meant as it is written is not."""

from __future__ import annotations

from typing import Any

import pytest

from learner.config.load import load_config
from learner.driver.preflight import setting_notes

NEEDED = ["model.path=m", "data.path=d", "rewards=[{use: number}]", "model.dtype=float32"]
GSPO = "learner.loss.ratio=gspo"


def told(*overrides: str, model: dict[str, Any] | None = None, row: dict[str, Any] | None = None) -> list[str]:
    return [*setting_notes(load_config(None, [*NEEDED, *overrides]), model or {}, row or {})]


def test_gspo_with_the_default_mean_weights_by_length() -> None:
    (line,) = told(GSPO)
    assert line.startswith("learner.loss.ratio: gspo with kind: dapo, the default, weights a completion by its length")
    assert told(GSPO, "learner.loss.kind=grpo") == told(GSPO, "learner.loss.kind=dapo") == []
    assert told("learner.loss.ratio=clip") == []


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"question": "What is it?", "video": b"..."}, "is not given video, which reward functions are"),
        ({"images": ["a.png"], "audio": "a.wav", "text": "?"}, "is not given images, audio, which"),
    ],
)
def test_columns_that_a_model_of_text_is_not_given(row: dict[str, Any], named: str) -> None:
    (line,) = told(row=row)
    assert named in line
    assert told(row=row | dict.fromkeys(("images", "audio", "video"))) == []


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
def test_the_attention_that_a_model_wants(name: str) -> None:
    (line,) = told(model={name: "flash_attention_3"})
    assert line.startswith(f"model.path: {name} of its config.json, flash_attention_3, is not followed: ")
