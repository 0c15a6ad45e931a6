"""Runs in one process, without Ray: the real preflight, loop, generator, reward processes and trainer, one run after
the other, so that vLLM and torch are imported once.

python -m tests.recipes.in_one_process    # stdin: JSON, a list of [configuration file, overrides]
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence

from benchmarks.system.local_run import local_run
from cluster.actor import Local
from learner.config.load import load_config
from learner.driver.preflight import place_output, prepare
from learner.driver.roles import make_trainer, worker_spec
from rollout.service import RolloutService
from rollout.vllm.environment import required_env
from rollout.worker import RolloutWorker


async def run(file: str, overrides: Sequence[str]) -> None:
    """A run of that configuration to its end, with one generator; it leaves its files in the run folder."""
    prepared = await asyncio.to_thread(lambda: prepare(place_output(load_config(file, overrides))))
    config, budgets, steps = prepared.config, prepared.budgets, prepared.total_steps
    config.run_dir.mkdir(parents=True)
    generator = Local("generator-0", RolloutWorker, [worker_spec(config, 0, budgets)])
    settled = config.model_copy(update={"learner": budgets.learner})
    trainer = Local("learner", make_trainer, [settled, steps, budgets.learner_bytes])
    whole = local_run(
        config.run_dir, config, steps, problems=prepared.problems, heldout=prepared.heldout, generators=[generator],
        trainer=trainer,
    )  # fmt: skip
    await whole.finish()
    await generator.call(RolloutService.close, 60)


if __name__ == "__main__":
    os.environ |= required_env(cuda=False)  # before anything imports torch
    for file, overrides in json.load(sys.stdin):
        asyncio.run(run(file, overrides))
