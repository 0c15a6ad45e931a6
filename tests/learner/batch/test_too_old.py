"""Tokens too old to train on: they are read, their completion is scored whole, and their terms are not in the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.algo.loss_config import LossConfig
from learner.batch.rows import read
from rollout.schema import SCHEMA, ragged
from tests.learner import naive
from tests.learner.rollouts import make_groups, uniform
from tests.learner.trainers import advantages_by_hand, distance, gradient, make_trainer, naive_gradient

OLD, YOUNG = 4, 5


def sampled_by(groups: list[pa.Table], versions: Any) -> list[pa.Table]:
    """The groups with other token_versions: `versions` gives those of a completion of so many tokens."""
    place, field = SCHEMA.get_field_index("token_versions"), SCHEMA.field("token_versions")
    rows = [[versions(len(ids)) for ids in ragged(group, "completion_ids")] for group in groups]
    return [group.set_column(place, field, pa.array(own, field.type)) for group, own in zip(groups, rows, strict=True)]


def resumed(groups: list[pa.Table]) -> list[pa.Table]:
    """Of the completions, in turn, the first half is too old, nothing, all, and all but the last token."""
    turns: list[Callable[[int], int]] = [lambda n: n // 2, lambda n: 0, lambda n: n, lambda n: n - 1]
    cuts = iter(turns * 3)

    def versions(length: int) -> list[int]:
        cut = next(cuts)(length)
        return [OLD] * cut + [YOUNG] * (length - cut)

    return sampled_by(groups, versions)


@pytest.mark.parametrize(
    ("kind", "ratio"), [("dapo", "masked"), ("dr_grpo", "clip"), ("grpo", "truncated"), ("grpo", "gspo")]
)
@pytest.mark.parametrize("budget", [1, 60, 1000])
async def test_gradient_is_that_of_the_loss_without_their_terms(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], kind: Any, ratio: Any, budget: int
) -> None:
    config = LossConfig(kind=kind, ratio=ratio, epsilon=(0.1, 0.1) if ratio == "gspo" else None)
    parts = resumed(groups)
    trainer = make_trainer(tiny_path, adapter=adapter_path, loss=config, token_budget=budget)
    found = await gradient(trainer, parts, oldest_version=YOUNG)
    model = naive.load(tiny_path, adapter_path)
    wanted = naive_gradient(model, None, parts, config, advantages_by_hand("batch"), oldest_version=YOUNG)
    assert distance(found, wanted) < 5e-5
    whole = make_trainer(tiny_path, adapter=adapter_path, loss=config, token_budget=budget)
    assert distance(await gradient(whole, parts), wanted) > 0.1, "the too old tokens would have had a gradient"


async def test_a_batch_that_is_wholly_too_old_changes_nothing(tiny_path: str, adapter_path: str) -> None:
    trainer = make_trainer(tiny_path, adapter=adapter_path)
    metrics = await trainer.step(make_groups([[0, 1], [1, 0]], uniform), oldest_version=1)
    assert (metrics["loss/trained_tokens"], metrics["loss/grad_norm"]) == (0, 0)


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("advantage", ["batch", "group"])
async def test_a_batch_without_any_reward_changes_nothing(
    tiny_path: str, adapter_path: str, loss: str, advantage: str
) -> None:
    """Its completions are of a task that no reward function scores."""
    config = LossConfig.model_validate({"kind": loss, "advantage": advantage})
    trainer = make_trainer(tiny_path, adapter=adapter_path, loss=config)
    metrics = await trainer.step(make_groups([[None, None], [None, None]], uniform))
    assert (metrics["loss/trained_tokens"], metrics["loss/grad_norm"]) == (0, 0)


@settings(max_examples=60)
@given(data=st.data(), oldest=st.integers(0, 4))
def test_what_comes_up_to_the_last_too_old_token_is_prompt(data: st.DataObject, oldest: int) -> None:
    """Also where a slower worker went on with what one of a newer policy had begun, so that versions fall."""
    groups = sampled_by(
        make_groups([[0, 1], [1, 0, 1]], lambda p, c: [-0.5 - i for i in range(len(c))], max_completion=6),
        lambda length: data.draw(st.lists(st.integers(0, 4), min_size=length, max_size=length)),
    )
    rows = read(groups, oldest)
    names = ("prompt_ids", "completion_ids", "behavior_logprobs", "token_versions")
    facts = [row for group in groups for row in zip(*(ragged(group, name) for name in names), strict=True)]
    for row, (prompt, ids, behavior, versions) in enumerate(facts):
        cut = max((i + 1 for i in range(len(ids)) if versions[i] < oldest), default=0)
        mine = rows.places([row])
        assert rows.prompts[row].tolist() == [*prompt.tolist(), *ids[:cut].tolist()]
        assert rows.lengths[row] == len(ids) - cut
        for found, wanted in ((rows.completions, ids), (rows.behavior, behavior), (rows.versions, versions)):
            np.testing.assert_array_equal(found[mine], wanted[cut:])
    assert len(rows.completions) == rows.lengths.sum()
