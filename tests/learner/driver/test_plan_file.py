"""plan.json of a run: what was planned, and what it turned out to take."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from cluster.memory.shape import SHAPES
from learner.config import RunConfig
from learner.driver.memory import Budgets, PlanFile, settle


def settled() -> Budgets:
    """Of a 3B in two slices of a card."""
    tree = {
        "model": {"path": "m"}, "data": {"path": "x"}, "rewards": [{"use": "format"}],
        "cluster": {"gpus": {"generator": 0.5, "learner": 0.5}},
        "rollout": {"kv_cache": "auto", "max_completion_length": 786}, "memory": {"device": "16GiB"},
    }  # fmt: skip
    return settle(RunConfig.model_validate(tree), SHAPES["Llama-3.2-3B"].to_config())


def test_the_file_holds_plan_and_measure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    budgets = settled()
    assert budgets.plan is not None
    file = PlanFile(tmp_path, budgets)
    file.measure({"memory/learner_peak": 5e9, "memory/generator_peak": 1e9})
    file.measure({"memory/learner_peak": 4e9, "memory/generator_peak": 0.5e9})
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["learner"]["measured"] == 5e9
    assert content["generator"]["measured"] == 1e9
    assert content["learner"]["planned"] == budgets.plan.learner_bytes == sum(content["learner"]["parts"].values())
    tensors = budgets.plan.generator_room - 1_500_000_000  # 0.8 GB of context, 0.7 that the allocator keeps
    with caplog.at_level(logging.WARNING):
        file.measure({"memory/generator_peak": 0.89 * tensors})
        assert caplog.records == []
        for share in (0.92, 0.94):
            file.measure({"memory/generator_peak": share * tensors})
    assert len(caplog.records) == 1


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "plan.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*plan\.partial'"):
        PlanFile(tmp_path, settled())
