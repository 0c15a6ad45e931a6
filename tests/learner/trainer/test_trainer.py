"""Trainer: its gradient is the textbook's, whatever the split, the loss or the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from learner.algo.surrogates import LossConfig
from rollout.schema import ragged
from tests.learner import naive
from tests.learner.trainers import advantages_by_hand, distance, gradient, groups_near, make_trainer, naive_gradient


@pytest.mark.parametrize(
    ("kind", "ratio", "advantage"),
    [
        ("dapo", "masked", "batch"),
        ("dapo", "clip", "group"),
        ("dr_grpo", "clip", "none"),
        ("grpo", "truncated", "group"),
        ("grpo", "gspo", "group"),
        ("dapo", "sequence_mask", "batch"),
    ],
)
async def test_gradient_is_the_textbooks(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], kind: Any, ratio: Any, advantage: Any
) -> None:
    bounds: Any = {"epsilon": (0.1, 0.1)} if ratio == "gspo" else {}
    config = LossConfig(kind=kind, ratio=ratio, advantage=advantage, bounds=bounds)
    trainer = make_trainer(tiny_path, adapter=adapter_path, loss=config, token_budget=60)
    found = await gradient(trainer, groups)
    model = naive.load(tiny_path, adapter_path)
    wanted = naive_gradient(model, None, groups, config, advantages_by_hand(advantage))
    assert distance(found, wanted) < 2e-5


@pytest.mark.parametrize("reference", ["base", "adapter"])
async def test_kl_to_the_reference_is_the_textbooks(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], reference: str, tmp_path: Path
) -> None:
    """Reference: the base with the adapter off; or, for a run started from an adapter, that adapter."""
    config = LossConfig(beta=0.3, ratio="clip")
    start = adapter_path if reference == "adapter" else None
    trainer = make_trainer(tiny_path, adapter=start, loss=config, learning_rate=0.01)
    await trainer.step(groups)  # away from the reference
    await trainer.save(tmp_path)
    model = naive.load(tiny_path, str(tmp_path))
    near = groups_near(model)
    found = await gradient(trainer, near)
    wanted = naive_gradient(model, naive.load(tiny_path, start), near, config, advantages_by_hand("batch"))
    assert distance(found, wanted) < 5e-5


@pytest.mark.parametrize("budget", [1, 40, 100])
@pytest.mark.parametrize("beta", [0.0, 0.1])
async def test_gradient_does_not_depend_on_the_split(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], budget: int, beta: float
) -> None:
    loss = LossConfig(beta=beta)
    found, whole = [
        await gradient(make_trainer(tiny_path, adapter=adapter_path, token_budget=b, loss=loss), groups)
        for b in (budget, 100_000)
    ]
    assert distance(found, whole) < 1e-5


async def test_skipping_groups_without_signal_changes_nothing(
    tiny_path: str, adapter_path: str, groups: list[pa.Table]
) -> None:
    trainer = make_trainer(tiny_path, adapter=adapter_path)
    # a KL too small to be seen makes the trainer keep every completion
    kept = make_trainer(tiny_path, adapter=adapter_path, loss=LossConfig(beta=1e-30))
    metrics, all_metrics = await trainer.step(groups), await kept.step(groups)
    found, wanted = (
        {name: weight.grad for name, weight in one._policy.masters.items() if weight.grad is not None}
        for one in (trainer, kept)
    )
    assert metrics["reward/zero_variance_groups"] == 1
    skipped = sum(len(c) for c in ragged(groups[1], "completion_ids"))
    assert all_metrics["loss/trained_tokens"] - metrics["loss/trained_tokens"] == skipped
    assert distance(found, wanted) < 1e-6


async def test_full_checkpointing_gives_the_same_gradient(
    tiny_path: str, adapter_path: str, groups: list[pa.Table]
) -> None:
    plain = await gradient(make_trainer(tiny_path, adapter=adapter_path), groups)
    trainer = make_trainer(tiny_path, adapter=adapter_path, checkpointing="full")
    forwards: list[int] = []
    layer = trainer._policy._lm.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: forwards.append(1))
    found = await gradient(trainer, groups)
    assert distance(found, plain) < 1e-6
    assert len(forwards) == 2  # once forwards, once again before the backward pass


async def test_bfloat16_gradient_is_near_the_float32_one(
    tiny_path: str, adapter_path: str, groups: list[pa.Table]
) -> None:
    found, wanted = [
        await gradient(make_trainer(tiny_path, adapter=adapter_path, dtype=dtype, token_budget=60), groups)
        for dtype in ("bfloat16", "float32")
    ]
    assert distance(found, wanted) < 0.1


async def test_a_step_that_broke_half_way_leaves_no_gradient_behind(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_path, adapter=adapter_path, dtype="bfloat16", token_budget=60)
    calls = iter(range(100))

    def collect() -> None:
        if next(calls) == 1:
            raise RuntimeError("out of memory")
        type(trainer._policy).collect_gradients(trainer._policy)

    monkeypatch.setattr(trainer._policy, "collect_gradients", collect)
    with pytest.raises(RuntimeError, match="out of memory"):
        await trainer.step(groups)
    found = await gradient(trainer, groups)
    fresh = make_trainer(tiny_path, adapter=adapter_path, dtype="bfloat16", token_budget=60)
    assert distance(found, await gradient(fresh, groups)) == 0
