"""Run folders as far as an export reads them, without a run: a checkpoint by the learner's own writer, and rollouts."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from learner.config import ModelConfig, RunConfig
from learner.driver import checkpoint
from learner.driver.checkpoint import TRAINER
from learner.driver.identity import FILE, Fingerprints, content_of
from learner.model.export import save
from learner.model.policy import Policy
from rollout import ledger

STEP = 8
HELD_OUT = [{"step": step, "metrics": {"eval/accuracy": step / 10}, "samples": []} for step in (0, STEP)]


def run_folder(folder: Path, base: str, groups: list[pa.Table] | None, *, scale: float = 0.1, **settings: Any) -> Path:
    """A run named `mine` that has saved step 8. scale: of the adapter's weights, or of what moves all weights."""
    tree = {
        "name": "mine", "output_dir": str(folder),
        "data": {"path": str(folder / "train.jsonl"), "system": "Be | brief."},
        "rewards": [{"use": f"{folder}/my.py:good", "args": {"api_key": "very-secret"}}],
        "model": {"path": base, "dtype": "float32", **settings.pop("model", {})}, **settings,
    }  # fmt: skip
    config = RunConfig.model_validate(tree)
    run = folder / "mine"
    asyncio.run(_commit(run, config, scale))
    (run / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    if groups is not None:
        ledger.write(run / "rollouts", STEP, groups)
    return run


async def _commit(run: Path, config: RunConfig, scale: float) -> None:
    inputs = Fingerprints({"rows": "d" * 64}, {"good of my.py": "e" * 64}, content_of(config.model.path))
    async with checkpoint.commit(run / "checkpoints", STEP, keep=2) as folder:
        save(moved_policy(config, scale), folder / TRAINER, config.model.path)
        (folder / "state.json").write_text(
            json.dumps({"step": STEP, "cursor": {"low": 0, "done": []}, "evaluations": HELD_OUT})
        )
        (folder / "config.json").write_text(config.model_dump_json())
        (folder / FILE).write_text(inputs.to_json())


def moved_policy(config: RunConfig, scale: float) -> Policy:
    """As if it had learned something."""
    model = ModelConfig(path=config.model.path, dtype=config.model.dtype, base=config.model.base)
    policy = Policy(
        model,
        None if config.learner.mode == "full" else config.learner.lora,
        checkpointing="none",
        seed=0,
        device=torch.device("cpu"),
    )
    torch.manual_seed(1)
    start = 1.0 if config.learner.mode == "full" else 0.0
    policy.load({name: start * old + scale * torch.randn_like(old) for name, old in policy.masters.items()})
    return policy
