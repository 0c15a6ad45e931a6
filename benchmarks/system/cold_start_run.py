"""The parts of a run whose moments benchmarks.system.cold_start tells.

The product knows nothing of it: what `learner.driver.roles` puts into other processes is replaced by the same with
a mark before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

from benchmarks.system.cold_start_main import born, mark
from rollout.delivery import Receipt
from rollout.engine import Engine, EngineSettings
from rollout.worker import Columns, RolloutWorker, WorkerSpec, vllm_engine

if TYPE_CHECKING:
    from learner.trainer.trainer import Trainer


class MarkedWorker(RolloutWorker):
    def __init__(self, spec: WorkerSpec) -> None:
        mark("generator: process", born())
        mark("generator: gleaner's code imported")
        super().__init__(spec)
        mark("generator: ready")

    async def _group(self, *args: Any) -> Columns:
        mark("generator: first group asked for")
        group = await super()._group(*args)
        mark("generator: first group done")
        return group

    async def take_policy(self, *args: Any) -> Receipt | None:
        mark("generator: first adapter arrives")
        return await super().take_policy(*args)


def marked_engine(settings: EngineSettings) -> Engine:
    mark("generator: tokenizer loaded")
    for module in ("torch", "vllm", "vllm.v1.engine.llm_engine", "rollout.vllm.engine"):
        import_module(module)
        mark(f"generator: {module} imported")
    engine = vllm_engine(settings)
    mark("generator: engine built")
    return engine


def marked_trainer(*args: Any) -> Trainer:
    mark("learner: process", born())
    mark("learner: gleaner's code imported")
    from learner.driver.roles import make_trainer

    for module in ("torch", "transformers", "peft", "learner.trainer"):
        import_module(module)
        mark(f"learner: {module} imported")
    trainer = make_trainer(*args)
    mark("learner: ready")
    return trainer


def _around(home: Any, name: str, before: str, after: str) -> None:
    inner: Callable[..., Any] = getattr(home, name)

    @wraps(inner)
    def outer(*args: Any, **named: Any) -> Any:
        mark(before)
        result = inner(*args, **named)
        mark(after)
        return result

    setattr(home, name, outer)


def mark_parts() -> None:
    """To be called once the roles' processes are at their imports: this imports what the driver imports then."""
    from cluster.telemetry import Metrics
    from learner.driver import launch, preflight, roles

    mark("driver: code imported")
    _around(preflight, "prepare", "driver: preflight begins", "driver: preflight done")
    _around(launch, "connect", "driver: Ray begins", "driver: Ray is up")
    _around(launch, "wire", "driver: all processes ready", "driver: loop begins")
    replaced: Mapping[str, Any] = {
        "RolloutWorker": MarkedWorker, "vllm_engine": marked_engine, "make_trainer": marked_trainer
    }  # fmt: skip
    for name, stand_in in replaced.items():
        assert hasattr(roles, name), f"learner.driver.roles has no {name} any more"
        setattr(roles, name, stand_in)
    log = Metrics.log

    def logged(self: Any, step: int, values: Mapping[str, float]) -> None:
        log(self, step, values)
        if step > 0:
            mark("driver: first step logged")

    Metrics.log = logged  # type: ignore[method-assign]
