"""memory.layout: alternating, in the whole loop: who has the card when, also where a generator is lost."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cluster.actor import ActorDied, Local, Unusable
from rollout.service import RolloutService
from tests.learner.loops import Worker, build, configure, consumed, finish


async def test_on_one_card_in_turns_the_generators_sleep_while_the_learner_works(tmp_path: Path) -> None:
    """The engines refuse to sleep while a call runs, and to generate or take a policy while they sleep."""
    workers = [Local(f"generator-{rank}", Worker, [1e-4, None]) for rank in range(2)]
    loop = build(tmp_path, configure(), 5, workers=workers, alternating=True)
    trainer = loop.trainer._object  # type: ignore[attr-defined]
    engines: list[Any] = [worker._object.engine for worker in workers]
    trainer.holds_the_card = lambda: all(engine._asleep for engine in engines)
    for worker in workers:  # as learner.driver.launch starts them
        await worker.call(RolloutService.sleep, 1)
    await finish(loop)
    assert consumed(tmp_path) == [list(range(3 * step, 3 * step + 3)) for step in range(5)]
    assert trainer.cached == 0
    assert not any(engine._asleep for engine in engines)


async def test_one_that_is_back_before_all_sleep_goes_to_sleep_as_well(tmp_path: Path) -> None:
    """Lost once it slept, and revived while another still takes its time: it is awake, and nobody is away."""
    late = asyncio.Event()

    class Slow(Worker):
        async def sleep(self) -> None:
            await late.wait()
            await super().sleep()

    class Lost(Local[Worker]):
        async def until_ended(self, silence_s: float) -> None:
            if late.is_set():
                await asyncio.Event().wait()
            engine: Any = self._object.engine
            while not engine._asleep:
                await asyncio.sleep(1e-3)
            asyncio.get_running_loop().call_later(0.05, late.set)
            raise ActorDied(self.name)

    workers: list[Any] = [Lost("generator-0", Worker, [1e-4, None]), Local("generator-1", Slow, [1e-4, None])]
    loop = build(tmp_path, configure(), 2, workers=workers, alternating=True)
    trainer = loop.trainer._object  # type: ignore[attr-defined]
    trainer.holds_the_card = lambda: all(worker._object.engine._asleep for worker in workers)
    for worker in workers:
        worker._object.engine._asleep = True  # as they are started
    await finish(loop)
    assert consumed(tmp_path) == [[0, 1, 2], [3, 4, 5]]


async def test_a_generator_that_is_lost_asleep_takes_the_card_again_when_the_learner_has_left_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody calls it before its turn, so nobody starts another into the learner's peak."""
    wakes, cached = itertools.count(1), list[int]()

    class Mortal(Worker):
        async def wake(self) -> None:
            if next(wakes) == 3:
                raise Unusable("killed while it slept")
            await super().wake()

    worker = Local("generator-0", Mortal, [1e-4, None])
    loop = build(tmp_path, configure(), 5, workers=[worker], alternating=True)
    trainer, revive = loop.trainer._object, worker.revive  # type: ignore[attr-defined]

    async def noted(deadline_s: float) -> None:
        cached.append(trainer.cached)
        await revive(deadline_s)

    monkeypatch.setattr(worker, "revive", noted)
    await worker.call(RolloutService.sleep, 1)
    await finish(loop)
    assert cached == [0]  # once, and after TrainerService.release_cache
    assert consumed(tmp_path) == [list(range(3 * step, 3 * step + 3)) for step in range(5)]


async def test_a_generator_that_is_heard_to_end_asleep_is_started_when_the_learner_has_left_the_card(
    tmp_path: Path,
) -> None:
    ends, revived = asyncio.Event(), list[bool]()

    class Watched(Local[Worker]):
        async def until_ended(self, silence_s: float) -> None:
            await (ends if self.name == "generator-0" else asyncio.Event()).wait()
            ends.clear()
            raise ActorDied(self.name)

        async def revive(self, deadline_s: float) -> None:
            revived.append(learning)
            await super().revive(deadline_s)

    workers = [Watched(f"generator-{rank}", Worker, [1e-4, None]) for rank in range(2)]
    loop = build(tmp_path, configure(), 5, workers=workers, alternating=True)
    trainer, learning = loop.trainer._object, False  # type: ignore[attr-defined]
    step = trainer.step

    async def while_one_ends(groups: list[pa.Table]) -> dict[str, float]:
        nonlocal learning
        learning = True
        if not revived:
            ends.set()
        await asyncio.sleep(0.05)
        metrics: dict[str, float] = await step(groups)
        learning = False
        return metrics

    trainer.step = while_one_ends
    for worker in workers:
        await worker.call(RolloutService.sleep, 1)
    await finish(loop)
    assert revived == [False]
    assert consumed(tmp_path) == [list(range(3 * step, 3 * step + 3)) for step in range(5)]
