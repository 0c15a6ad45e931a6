"""A base in shards over real processes: the bits of a whole base, whatever the model and the settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from examples.random_model import make_tiny_model
from learner.algo.surrogates import LossConfig
from tests.learner.adapters import written_adapter
from tests.learner.rank_processes import rank_processes, steps
from tests.learner.rollouts import make_groups, uniform
from tests.learner.trainers import make_trainer

EXACT: dict[str, Any] = {"reduce": "exact", "learning_rate": 1e-2, "token_budget": 300}
SEVERAL = {"updates_per_batch": 2, "loss": LossConfig(ratio="clip", beta=0.1)}


@pytest.fixture(scope="module")
def ragged() -> list[pa.Table]:
    """Five groups of 80 to 240 tokens: ranks have different numbers of micro-batches."""
    rng = np.random.default_rng(0)
    return make_groups([rng.normal(size=6).tolist() for _ in range(5)], uniform, max_completion=40)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("tied", "settings", "packed", "ranks"),
    [
        pytest.param(False, SEVERAL | {"checkpointing": "full"}, True, 3, marks=pytest.mark.long),
        (True, {}, False, 2),
        pytest.param(
            False, {"algorithm": "ppo", "dtype": "bfloat16", "checkpointing": 1}, True, 2, marks=pytest.mark.long
        ),
    ],
    ids=["packed", "tied, padded", "PPO"],
)
async def test_a_base_in_shards_changes_no_bit(
    tmp_path: Path, ragged: list[pa.Table], tied: bool, settings: dict[str, Any], packed: bool, ranks: int
) -> None:
    path = str(make_tiny_model(tmp_path / "model", tied=tied))
    adapter = written_adapter(path, tmp_path, seed=1)
    alone = await steps(make_trainer(path, adapter=adapter, **EXACT, **settings), ragged, 2, packed)
    assert len({digest for digest, _ in alone}) == 2
    with rank_processes(ranks, path, sharded=True, adapter=adapter, **EXACT, **settings) as processes:
        assert processes.all(steps, ragged, 2, packed) == [alone] * ranks
