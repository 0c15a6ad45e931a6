"""What a learner's process on a card is started with, read in that process, on a Ray node that is said to have one."""

import os
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.ray_cluster import Session, connect
from learner.config import RunConfig
from learner.driver import roles
from learner.driver.memory import settle

MODEL = {"model_type": "unknown"}


class Told:
    """A role that starts without a card, and tells what torch has as its allocator's settings there."""

    def __init__(self, *args: Any) -> None:
        pass

    async def allocator(self) -> tuple[str | None, str]:
        import torch

        return os.environ.get("PYTORCH_ALLOC_CONF"), torch._C._accelerator_getAllocatorSettings()

    async def rehearse(self, prompt_length: int, teacher_length: int = 0) -> dict[str, float]:
        return {"memory/learner_peak": 0.0}

    async def pulse(self) -> float:
        return 0.0


@pytest.fixture
async def session(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Session]:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 1}')
    session = connect("local", min_cpus=2)
    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # this file is no module in an actor's process
    yield session
    await session.close()


@pytest.mark.long
async def test_the_learner_on_a_card_has_expandable_segments_and_the_generator_has_not(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's sleep has an allocator of its own, which refuses them."""
    monkeypatch.setattr(roles, "RolloutWorker", Told)
    monkeypatch.setattr(roles, "make_trainer", Told)
    config = RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "x"},
            "rewards": [{"use": "format"}],
            "cluster": {"gpus": {"generator": 0.5, "learner": 0.5}},
        }
    )
    prepared: Any = SimpleNamespace(config=config, budgets=settle(config, MODEL), total_steps=1)
    started = await roles.start_processes(prepared, session, print)
    (generator,), learner = started.generators, started.learner
    told: Any = Told.allocator
    assert await learner.call(told, 30) == ("expandable_segments:True",) * 2
    assert await generator.call(told, 30) == (None, "")
