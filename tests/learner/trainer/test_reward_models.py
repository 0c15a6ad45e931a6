"""Reward models on the policy's base, against transformers' sequence classification with PEFT, one row at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from rollout.schema import ragged, rewards_of, with_part
from tests.learner.model.test_roles import theirs
from tests.learner.trainers import adapter_of, distance, gradient, make_trainer

PAD = 0  # of the tiny model


@pytest.fixture(scope="module")
def models(tiny_path: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of other ranks and layers than the policy's."""
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("one", "two")]
    theirs(tiny_path).save_pretrained(folders[0])
    theirs(tiny_path, r=4, target_modules=["k_proj", "up_proj"]).save_pretrained(folders[1])
    return folders


def wanted(path: str, folder: str, groups: list[pa.Table]) -> list[float]:
    model = theirs(path, folder)
    rows = [
        np.concatenate(row)
        for group in groups
        for row in zip(ragged(group, "prompt_ids"), ragged(group, "completion_ids"), strict=True)
    ]
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor(row[None], dtype=torch.int64)).logits[0, 0]) for row in rows]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("budget", [16, 8192])
async def test_scores_are_transformers_whatever_the_micro_batches(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], models: list[str], packed: bool, budget: int
) -> None:
    trainer = make_trainer(tiny_path, adapter=adapter_path, reward_adapters=models, token_budget=budget)
    assert trainer._policy.packed
    trainer._policy.packed = packed
    for adapter in trainer._policy.scored.values():
        adapter.pad = PAD
    found = await trainer.score(groups)
    for said, folder in zip(found, models, strict=True):
        expected = wanted(tiny_path, folder, groups)
        assert np.std(expected) > 1e-2
        np.testing.assert_allclose(said, expected, atol=1e-5)
    np.testing.assert_allclose(await trainer.score(groups[::-1]), _reversed(found, groups), atol=1e-5)


def _reversed(found: list[list[float]], groups: list[pa.Table]) -> list[list[float]]:
    stops = np.cumsum([len(group) for group in groups])
    starts = stops - [len(group) for group in groups]
    return [
        [x for start, stop in zip(starts[::-1], stops[::-1], strict=True) for x in one[start:stop]] for one in found
    ]


async def test_the_gradient_is_that_of_the_same_rewards_from_a_function(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], models: list[str]
) -> None:
    trainer = make_trainer(tiny_path, adapter=adapter_path, reward_adapters=models[:1])
    (scores,) = await trainer.score(groups)
    scored, by_function, begin = [], [], 0
    for group in groups:
        own = scores[begin : begin + len(group)]
        begin += len(group)
        scored.append(with_part(group, "model", 0.5, own))
        sums = [None if np.isnan(r) else r + 0.5 * s for r, s in zip(rewards_of(group), own, strict=True)]
        index = group.schema.get_field_index("reward")
        by_function.append(group.set_column(index, group.schema.field(index), pa.array(sums, pa.float32())))
    plain: Any = make_trainer(tiny_path, adapter=adapter_path)
    expected = await gradient(plain, by_function)
    assert distance(expected, await gradient(make_trainer(tiny_path, adapter=adapter_path), groups)) > 1e-2
    assert distance(await gradient(trainer, scored), expected) == 0.0


async def test_a_reward_model_is_no_part_of_what_is_saved_or_served(
    tiny_path: str, adapter_path: str, models: list[str], tmp_path: Path
) -> None:
    plain, with_model = (
        make_trainer(tiny_path, adapter=adapter_path, reward_adapters=folders) for folders in ([], models)
    )
    served = [await adapter_of(trainer) for trainer in (plain, with_model)]
    assert served[0].digest == served[1].digest
    saved = [await trainer.save(tmp_path / str(i)) for i, trainer in enumerate((plain, with_model))]
    assert saved[0]["adapter_model.safetensors"] == saved[1]["adapter_model.safetensors"]
