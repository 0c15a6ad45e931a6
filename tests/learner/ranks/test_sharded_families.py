"""A whole model that two ranks train in shards is the one that a single process trains, for many architectures, each
held to what it began with.

FAMILIES=all: all of KINDS (three minutes); else some that differ most.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from examples.random_families import FAMILIES, TINY, make_family
from learner.algo.surrogates import LossConfig
from tests.learner.rank_processes import rank_processes
from tests.learner.ranks.test_divided_weights import FULL, trained
from tests.learner.rollouts import make_groups, uniform
from tests.learner.trainers import make_trainer
from tests.model_rows import ROWS

FEW = ("gemma3", "lfm2")
KINDS = (
    "llama", "mistral", "gemma", "gemma2", "gemma3", "qwen3", "cohere", "glm4", "granite", "olmo2", "olmo3", "phi3",
    "apertus", "exaone4", "starcoder2", "helium", "smollm3", "lfm2", "nemotron",
)  # fmt: skip
APART = {"float32": 1e-5, "bfloat16": 1e-3}  # AdamW moves a weight by up to 3e-3 in three steps


def written(kind: str, folder: Path) -> str:
    if kind in FAMILIES:
        return str(make_family(folder, kind))
    torch.manual_seed(0)
    hf: Any = transformers
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **(TINY | ROWS[kind])))
    model.float().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS if os.environ.get("FAMILIES") == "all" else FEW)
async def test_two_ranks_train_what_one_process_trains(tmp_path: Path, kind: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    groups = make_groups([rng.normal(size=6).tolist() for _ in range(5)], uniform, max_completion=40)
    path, settings = written(kind, tmp_path / kind), FULL | {"dtype": dtype, "loss": LossConfig(beta=0.3)}
    wanted, *_ = await trained(make_trainer(path, **settings), groups, 3)
    with rank_processes(2, path, sharded=True, **settings) as processes:
        found, *_ = processes.all(trained, groups, 3)[0]
    assert found.keys() == wanted.keys()
    assert max(float((found[name].float() - wanted[name].float()).abs().max()) for name in wanted) <= APART[dtype]
