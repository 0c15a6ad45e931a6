"""The text part of every checkpoint with towers in examples/random_towers.py: it is exactly what the whole model
computes of text, its adapters fit the whole model, and the whole system takes three steps by adapter, by merged weights
and trained as a whole. `make test-families`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.learner.model_families import run
from examples.random_towers import CHECKPOINTS, make_checkpoint
from tests.learner.model.test_text_part import check_export, check_text_part

pytestmark = pytest.mark.long
LIMIT = 2e-5  # nats
WAYS: dict[str, dict[str, Any]] = {"adapter": {}, "merged": {"push": "merged"}, "full": {"mode": "full"}}
WITH_EXPERTS = ("llama4", "qwen3_5_moe")  # only their attention is adapted
HYBRID = ("qwen3_5", "qwen3_5_moe")  # vLLM's modules of them import torchvision
HYBRID_LIMIT = 5e-5
TOGETHER = [(name, way) for name in CHECKPOINTS for way in WAYS if way == "adapter" or name not in WITH_EXPERTS]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_text_part_is_what_the_whole_model_computes_of_text(name: str, tmp_path: Path) -> None:
    check_text_part(make_checkpoint(tmp_path, name))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_exported_adapter_fits_the_whole_model(name: str, tmp_path: Path) -> None:
    check_export(make_checkpoint(tmp_path / "checkpoint", name), tmp_path / "adapter")


@pytest.mark.parametrize(("name", "way"), TOGETHER)
def test_sampler_and_learner_are_one_policy(name: str, way: str, tmp_path: Path) -> None:
    if name in HYBRID:
        pytest.importorskip("torchvision")
    steps = run(f"{name}+towers", tmp_path, 3, WAYS[way])
    assert len(steps) == 3
    assert max(step["policy/mismatch_max"] for step in steps) < (HYBRID_LIMIT if name in HYBRID else LIMIT)
