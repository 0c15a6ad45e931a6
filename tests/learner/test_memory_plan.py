"""memory: of a run -> budgets: what is asked for stays, what is auto is planned, what cannot be is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cluster import memory
from cluster.planner import USABLE
from cluster.shapes import SHAPES
from learner.config import RunConfig
from learner.memory_plan import DEFAULT_KV, MemoryPlanError, PlanFile, settle

GIB = 2**30
BERT = {"model_type": "bert"}


def run(name: str = "Llama-3.2-3B", **changes: Any) -> tuple[RunConfig, dict[str, Any]]:
    tree = {
        "model": {"path": name}, "data": {"path": "x"}, "rewards": [{"use": "format"}],
        "cluster": {"gpus": {"generator": 0.5, "learner": 0.5}},
        "rollout": {"kv_cache": "auto", "max_completion_length": 786},
    }  # fmt: skip
    return RunConfig.model_validate(tree | changes), SHAPES[name].to_config()


def test_two_slices_share_a_card_within_its_bytes() -> None:
    config, model = run(memory={"device": "16GiB"})
    budgets = settle(config, model)
    assert budgets.plan is not None
    assert budgets.plan.layout == "slices"
    assert budgets.learner_bytes is not None
    together = budgets.learner_bytes + memory.CONTEXT + budgets.plan.generator_bytes
    assert together == pytest.approx(USABLE * 16 * GIB)
    assert budgets.plan.learner_bytes - memory.CONTEXT <= budgets.learner_bytes
    assert budgets.learner.checkpointing != "auto"
    assert isinstance(budgets.learner.token_budget, int)
    assert budgets.kv_cache == budgets.plan.kv_bytes


def test_a_card_for_each_role() -> None:
    config, model = run(memory={"device": "16GiB"}, cluster={"gpus": {"generator": 1, "learner": 1}})
    budgets = settle(config, model)
    assert budgets.plan is not None
    assert budgets.plan.layout == "separate"
    assert budgets.learner_bytes == round(USABLE * 16 * GIB) - memory.CONTEXT
    assert budgets.kv_cache > GIB


def test_what_is_given_stays() -> None:
    learner = {"checkpointing": "full", "token_budget": 2048}
    sizes = {"device": "24GiB", "learner": "9GiB"}
    config, model = run(memory=sizes, learner=learner, rollout={"kv_cache": "1GiB"})
    budgets = settle(config, model)
    assert (budgets.learner.checkpointing, budgets.learner.token_budget) == ("full", 2048)
    assert (budgets.kv_cache, budgets.learner_bytes) == (GIB, 9 * GIB)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"memory": {"device": "12GiB"}}, "needs .*model.base=nf4"),
        ({"memory": {"device": "16GiB", "learner": "5GiB"}}, "memory.learner"),
        ({"memory": {"device": "16GiB", "layout": "alternating"}}, "alternating"),
        ({"memory": {"device": "16GiB", "layout": "separate"}}, "separate needs a card for each"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], pattern: str) -> None:
    with pytest.raises(MemoryPlanError, match=pattern):
        settle(*run(**changes))


def test_without_a_device_nothing_is_limited() -> None:
    config, model = run()
    budgets = settle(config, model)
    assert (budgets.learner_bytes, budgets.kv_cache) == (None, DEFAULT_KV)
    assert budgets.learner == config.learner
    assert "no limit" in budgets.note
    assert settle(config, BERT).plan is None
    with pytest.raises(MemoryPlanError, match="bert"):
        settle(run(memory={"device": "16GiB"})[0], BERT)


def test_the_file_holds_plan_and_measure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    budgets = settle(*run(memory={"device": "16GiB"}))
    assert budgets.plan is not None
    file = PlanFile(tmp_path, budgets)
    file.measure({"memory/learner_peak": 5e9, "memory/generator_peak": 1e9})
    file.measure({"memory/learner_peak": 4e9, "memory/generator_peak": 0.5e9})
    content = json.loads((tmp_path / "plan.json").read_text())
    assert content["learner"]["measured"] == 5e9
    assert content["generator"]["measured"] == 1e9
    assert content["learner"]["planned"] == budgets.plan.learner_bytes == sum(content["learner"]["parts"].values())
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        for share in (0.92, 0.94):
            file.measure({"memory/generator_peak": share * budgets.plan.generator_bytes})
    assert len(caplog.records) == 1
