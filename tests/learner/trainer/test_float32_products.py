"""The library of float32 products stays what it was unless the other one was tried, is exact, and is faster."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.config import RunConfig
from learner.driver.record import POLICIES
from learner.driver.roles import make_trainer, settle_products
from learner.trainer import float32_products
from learner.trainer.float32_products import LESS, ONEDNN, choose_library
from learner.trainer.service import Arithmetic
from tests.learner.trainers import make_trainer as trainer_of_a_test

SETTING: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    """The setting is the whole process's."""
    before, level = SETTING.fp32_precision, logging.getLogger("learner").level
    yield
    SETTING.fp32_precision = before
    logging.getLogger("learner").setLevel(level)


@pytest.mark.parametrize(
    ("exact", "faster", "kept"),
    [(1.0, 0.0, True), (0.0, 0.0, False), (1.0, 1e9, False)],
    ids=["exact and faster", "rounded", "slower"],
)
def test_it_is_kept_only_where_it_is_exact_and_faster(
    exact: float, faster: float, kept: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(float32_products, "EXACT", exact)
    monkeypatch.setattr(float32_products, "FASTER", faster)
    monkeypatch.setattr(float32_products, "processor", {"vendor_id": "AuthenticAMD"}.get)
    before = SETTING.fp32_precision
    with caplog.at_level(logging.INFO, "learner"):
        assert choose_library() is kept
    assert SETTING.fp32_precision == (LESS if kept else before)
    assert f"float32 products: {'oneDNN' if kept else 'torch'}" in caplog.text


def test_the_error_is_that_of_float64() -> None:
    a, b = torch.randn(64, 32), torch.randn(32, 48)
    rounded = a.bfloat16().float() @ b.bfloat16().float()
    assert float32_products._error(a @ b, a, b) < float32_products.EXACT
    assert float32_products._error(rounded, a, b) > 1000 * float32_products.EXACT


def test_only_the_learners_process_chooses(
    tiny_path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(float32_products, "FASTER", 0.0)
    monkeypatch.setattr(float32_products, "EXACT", 1.0)
    monkeypatch.setattr(float32_products, "processor", {"vendor_id": "AuthenticAMD"}.get)
    before = SETTING.fp32_precision
    trainer_of_a_test(tiny_path)
    assert SETTING.fp32_precision == before
    settings = {"model": {"path": tiny_path}, "data": {"path": "none.jsonl"}, "rewards": [{"use": "number"}]}
    config = RunConfig.model_validate(settings)
    with monkeypatch.context() as intel:
        intel.setattr(float32_products, "processor", {"vendor_id": "GenuineIntel"}.get)
        make_trainer(config, 1, None)
    assert SETTING.fp32_precision == before  # a trial there is decided by noise
    make_trainer(config, 1, None)
    assert SETTING.fp32_precision == LESS
    assert "float32 products: oneDNN" in caplog.text


@pytest.mark.parametrize(("recorded", "faster"), [(ONEDNN, 1e9), ("default", 0.0)])
def test_a_resumed_run_keeps_the_library_that_it_had(
    recorded: str, faster: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a trial would choose the other one now."""
    monkeypatch.setattr(float32_products, "FASTER", faster)
    monkeypatch.setattr(float32_products, "EXACT", 1.0)
    monkeypatch.setattr(float32_products, "processor", {"vendor_id": "AuthenticAMD"}.get)
    line = {"step": 1, "sha256": "", "total_steps": 2, "arithmetic": Arithmetic("2", "CPU", 1, recorded)._asdict()}
    (tmp_path / POLICIES).write_text(json.dumps(line) + "\n")
    settle_products(tmp_path)
    assert float32_products.library() == recorded
