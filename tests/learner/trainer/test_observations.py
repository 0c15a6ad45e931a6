"""What an environment said is read by the policy and never learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from learner.algo.surrogates import LossConfig
from learner.trainer.trainer import Trainer
from rollout.schema import SCHEMA, masks_of, ragged
from tests.learner import naive
from tests.learner.rollouts import observed
from tests.learner.trainers import (
    TEMPERATURE,
    adapter_of,
    advantages_by_hand,
    distance,
    gradient,
    groups_near,
    make_trainer,
    masters,
)

RATIOS = ["masked", "clip", "gspo", "sequence_mask", "cispo"]


def textbook(model: Any, groups: list[pa.Table], config: LossConfig) -> tuple[dict[str, Any], list[Any]]:
    """Gradient of the adapter, and of each completion's logprobs, observations among them: the loss is of all tokens,
    times the mask."""
    advantages = advantages_by_hand(config.advantage)
    total = sum(int(np.concatenate(masks_of(group)).sum()) for group in groups)
    total -= int(masks_of(groups[2])[1].sum())  # one has no reward
    slopes = []
    for group, own in zip(groups, advantages, strict=True):
        columns = [ragged(group, name) for name in ("prompt_ids", "completion_ids", "behavior_logprobs")]
        for prompt, completion, behavior, mask, advantage in zip(*columns, masks_of(group), own, strict=True):
            if advantage != advantage:
                continue
            lp = naive.logprobs(model, prompt.tolist(), completion.tolist(), TEMPERATURE)
            lp.retain_grad()
            kept = torch.from_numpy(mask)
            (naive.loss(lp[kept], torch.tensor(behavior)[kept], advantage, None, config).sum() / total).backward()
            slopes.append((lp.grad, mask))
    weights = {n.replace(".default.", "."): w.grad for n, w in model.named_parameters() if w.requires_grad}
    return weights, slopes


@pytest.mark.parametrize("ratio", RATIOS)
async def test_the_gradient_is_that_of_the_sampled_tokens_alone(tiny_path: str, adapter_path: str, ratio: Any) -> None:
    model = naive.load(tiny_path, adapter_path)
    groups = [observed(group) for group in groups_near(model)]
    config = LossConfig(ratio=ratio, bounds={"epsilon": (0.1, 0.1)} if ratio == "gspo" else {})
    found = await gradient(make_trainer(tiny_path, adapter=adapter_path, loss=config, token_budget=60), groups)
    wanted, slopes = textbook(model, groups, config)
    assert distance(found, wanted) < 2e-5
    seen = [slope[~torch.from_numpy(mask)] for slope, mask in slopes]
    assert sum(len(one) for one in seen) > 20
    assert all(not one.count_nonzero() for one in seen)


@pytest.mark.parametrize(("ratio", "algorithm"), [*((ratio, "grpo") for ratio in RATIOS), ("clip", "ppo")])
async def test_nothing_of_an_observation_but_its_tokens_counts_to_the_bit(
    tiny_path: str, adapter_path: str, ratio: Any, algorithm: Any
) -> None:
    """Its logprob is a placeholder: whatever stands there, updates and metrics are the same."""
    groups = groups_near(naive.load(tiny_path, adapter_path))
    config = LossConfig(ratio=ratio, bounds={"epsilon": (0.1, 0.1)} if ratio == "gspo" else {})
    after, metrics = [], []
    for changed in (0.0, -30.0):
        trainer = make_trainer(tiny_path, adapter=adapter_path, loss=config, algorithm=algorithm)
        found = await trainer.step([observed(group, changed) for group in groups])
        after.append(all_masters(trainer))
        metrics.append({key: value for key, value in found.items() if key.startswith(("loss/", "policy/", "value/"))})
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])
    assert metrics[0] == metrics[1]


def all_masters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Of the policy and, with PPO, of the value."""
    scored = trainer._policy.scored.values()
    values = {f"value {name}": weight for role in scored if role.masters for name, weight in role.masters.named.items()}
    return masters(trainer) | values


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
async def test_the_state_before_an_observation_has_no_gradient_to_the_bit(
    tiny_path: str, adapter_path: str, algorithm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the policy and of PPO's value. A last state is read by its head alone."""
    groups = [observed(group) for group in groups_near(naive.load(tiny_path, adapter_path))]
    trainer = make_trainer(tiny_path, adapter=adapter_path, algorithm=algorithm, token_budget=1)  # each row alone
    seen: list[tuple[list[int], torch.Tensor]] = []
    plain = trainer._policy.hidden

    def hidden(ids: torch.Tensor, *layout: Any) -> torch.Tensor:
        states = plain(ids, *layout)
        if states.requires_grad:
            states.retain_grad()
            seen.append((ids[0].tolist(), states))
        return states

    monkeypatch.setattr(trainer._policy, "hidden", hidden)
    if algorithm == "ppo":
        torch.nn.init.normal_(trainer._policy.scored["value"].head.weight)
    await trainer.step(groups)
    rows = {
        (*prompt.tolist(), *completion[:-1].tolist()): [False] * (len(prompt) - 1) + mask.tolist()
        for group in groups
        for prompt, completion, mask in zip(
            ragged(group, "prompt_ids"), ragged(group, "completion_ids"), masks_of(group), strict=True
        )
    }
    passes = {"grpo": 7, "ppo": 22}[algorithm]  # eleven completions have a reward; GRPO learns from those of two groups
    assert len(seen) == passes
    for ids, states in seen:
        assert states.grad is not None
        assert (states.grad != 0).any(1).tolist() == rows[tuple(ids)]


async def test_other_observations_are_another_conversation(tiny_path: str, adapter_path: str) -> None:
    groups = [observed(group) for group in groups_near(naive.load(tiny_path, adapter_path))]
    place = SCHEMA.get_field_index("completion_ids")
    others = []
    for group in groups:
        masks, rows = masks_of(group), ragged(group, "completion_ids")
        ids = [np.where(mask, row, (row + 1) % 250).astype(np.int32) for mask, row in zip(masks, rows, strict=True)]
        others.append(group.set_column(place, SCHEMA.field(place), pa.array(ids, SCHEMA.field(place).type)))
    digests = []
    for some in (groups, others):
        trainer = make_trainer(tiny_path, adapter=adapter_path, learning_rate=0.01)
        await trainer.step(some)
        digests.append((await adapter_of(trainer)).digest)
    assert digests[0] != digests[1]
