"""A run folder whose steps a real learner has taken, on groups that nobody generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cluster.actor import Local
from cluster.telemetry import Metrics
from learner.config import RunConfig
from learner.config.load import to_yaml
from learner.driver import checkpoint
from learner.driver.identity import FILE, fingerprints_of
from learner.driver.metrics import batch_metrics
from learner.driver.record import StepRecord
from learner.trainer.trainer import Trainer
from tests.learner.rollouts import make_groups

REWARDS = [[0.0, 1.0, 1.0, 0.5], [1.0, 1.0, 0.0, 1.0]]


def config_of(folder: Path, model: str, **learner: Any) -> RunConfig:
    lora = {"lora": {"rank": 8}} if learner.get("mode") != "full" else {}
    return RunConfig.model_validate(
        {
            "name": folder.name,
            "output_dir": str(folder.parent),
            "steps": 10,
            "model": {"path": model, "dtype": "float32"},
            "data": {"path": "none.jsonl"},
            "rewards": [{"use": "length", "args": {"target": 5}}],
            "rollout": {"num_generations": 4, "max_completion_length": 16},
            "learner": {"groups_per_step": 2, "learning_rate": 1e-3, **lora, **learner},
            "trackers": [],
        }
    )


def trainer_of(config: RunConfig, budget: int) -> Trainer:
    """As learner.driver.roles builds it, with the library of float32 products that this process has."""
    return Trainer(
        config.model,
        config.learner.model_copy(update={"token_budget": budget}),
        temperature=config.rollout.temperature,
        max_completion_length=config.rollout.max_completion_length,
        total_steps=10,
        seed=config.seed,
        device="cpu",
    )


def groups_of(step: int) -> list[pa.Table]:
    rng = np.random.default_rng(step)
    groups = make_groups(REWARDS, lambda _, completion: rng.uniform(-6, -5, len(completion)).tolist(), seed=step)
    return [_with_texts(group) for group in groups]


def _with_texts(group: pa.Table) -> pa.Table:
    """What a reward function is given: a plain prompt, and a letter for each token."""
    texts = ["a" * len(ids) for ids in group.column("completion_ids").to_pylist()]
    problems = [json.dumps({"messages": "Say a", "columns": {}})] * len(group)
    for name, values in (("completion", texts), ("problem", problems)):
        place = group.schema.get_field_index(name)
        group = group.set_column(place, group.schema.field(place), pa.array(values))
    return group


async def record(folder: Path, config: RunConfig, steps: int, *, halved_at: int) -> None:
    """Takes the steps, and leaves what a run leaves: a checkpoint after the second, and from step `halved_at` on
    micro-batches of half as many tokens, as after running out of memory."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    trainer = trainer_of(config, 64)
    record = StepRecord(folder, 10, Local("learner", lambda: trainer, []), 60.0)
    await record.begin(0)
    record.policy((await trainer.outgoing())[1].policy_id)
    lines = Metrics(folder, [], 0)
    for step in range(1, steps + 1):
        if step == halved_at:
            trainer._budget.tokens //= 2
        groups = groups_of(step)
        record.rollouts(step, groups)
        metrics = batch_metrics(groups, step - 1) | {"rollout/refilled_groups": 0.0} | await trainer.step(groups)
        record.policy((await trainer.outgoing())[1].policy_id)
        lines.log(step, metrics | {"time/step": 2.0})
        if step == 2:
            async with checkpoint.commit(folder / "checkpoints", step, keep=1) as saved:
                await trainer.save(saved / "trainer")
                (saved / FILE).write_text(fingerprints_of(config, ()).to_json())
    lines.close()
