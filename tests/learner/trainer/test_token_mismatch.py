"""The mismatch of each token, against logprobs that are computed one completion at a time."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from rollout.schema import ragged
from tests.learner import naive
from tests.learner.rollouts import observed
from tests.learner.trainers import TEMPERATURE, make_trainer


@pytest.mark.parametrize("updates", [1, 2])
async def test_each_trained_token_has_that_of_the_policy_that_the_batch_began_with(
    tiny_path: str, adapter_path: str, groups: list[pa.Table], updates: int
) -> None:
    given = [observed(groups[0]), *groups[1:]]  # the second group has no signal, the third a row without a reward
    trainer = make_trainer(
        tiny_path, adapter=adapter_path, token_budget=40, updates_per_batch=updates, learning_rate=0.02
    )
    await trainer.step(given)
    found = (await trainer.mismatch()).to_pylist()
    model = naive.load(tiny_path, adapter_path)
    columns = (*(ragged(pa.concat_tables(given), n) for n in ("prompt_ids", "completion_ids", "behavior_logprobs")),)
    masks = [mask for group in given for mask in group.column("loss_mask").to_pylist()]
    for row, (prompt, completion, behavior) in enumerate(zip(*columns, strict=True)):
        if row in (4, 5, 6, 7, 9):
            assert found[row] is None
            continue
        with torch.no_grad():
            own = naive.logprobs(model, prompt.tolist(), completion.tolist(), TEMPERATURE).numpy()
        wanted = own - behavior if masks[row] is None else np.where(masks[row], own - behavior, np.nan)
        np.testing.assert_allclose(np.asarray(found[row], np.float32), wanted, rtol=1e-3, atol=1e-4)
