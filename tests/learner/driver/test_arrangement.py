"""memory.layout: alternating, in the whole loop: who has the card when, also where a generator is lost. A generator
that owns the learner's base is lost, at each point: two bases never lie in memory at once.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from benchmarks.system.local_run import VOCAB
from cluster.actor import ActorDied, Local, Method, RemoteError, Unusable
from cluster.errors import WrongInput
from learner.driver.failure import LearnerError, WatchedLearner
from rollout.delivery import Answer
from rollout.fakes import FakeEngine, FakeWorker
from rollout.service import RolloutService
from rollout.types import Manifest
from tests.learner.loops import Trainer, Worker, build, configure, consumed, finish, first, lines, waiting


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


# A generator that owns the learner's base is lost, at each point: two bases never lie in memory at once.

STEPS = 6


class Card:
    """Who holds a base, in the order of events. faults: event -> the error that it comes to, once."""

    def __init__(self, faults: dict[str, Exception]) -> None:
        self.events: list[str] = []
        self.faults = faults
        self.owner = self.mapped = False

    def at(self, event: str) -> None:
        self.events.append(event)
        if event in self.faults:
            raise self.faults.pop(event)


class Generator(Local[Any]):
    """Local, whose process is lost at the third group, and later as `faults` say."""

    def __init__(self, card: Card) -> None:
        self.card, self.groups = card, 0
        card.owner = True
        super().__init__("generator-0", FakeWorker, [FakeEngine(VOCAB)])

    async def call(self, method: Method[Any, Any, Any], deadline_s: float, /, *args: Any, **kwargs: Any) -> Any:
        name = method.__name__
        if name == "rollout":
            self.groups += 1
            if self.groups == 3:
                self.card.owner = False
                raise ActorDied("generator-0: process died during rollout")
        elif name in ("share_base", "take_policy"):
            self.card.at(name)
        return await super().call(method, deadline_s, *args, **kwargs)

    async def revive(self, deadline_s: float) -> None:
        self.card.owner = False
        assert not self.card.mapped, "a second base while the learner maps the first"
        self.card.at("start")
        self._make = lambda: FakeWorker(FakeEngine(VOCAB))
        await super().revive(deadline_s)
        self.card.owner = True


class Learner(Trainer):
    """Steps only on a base."""

    def __init__(self, card: Card) -> None:
        super().__init__(0.0, 0.0)
        self.card = card
        card.mapped = True
        self.owner = ""
        self.holds_the_card = lambda: card.mapped

    async def probe(self, token_ids: list[int]) -> Answer:
        while not self.card.mapped:
            await asyncio.sleep(1e-3)
        return await super().probe(token_ids)

    async def detach_base(self) -> None:
        self.card.mapped = False
        self.card.at("detach")

    async def attach_base(self, manifest: Manifest) -> None:
        assert self.card.owner
        assert manifest.owner != self.owner
        self.card.at("attach")
        self.owner, self.card.mapped = manifest.owner, True


def run_of(folder: Path, faults: dict[str, Exception]) -> tuple[Any, Card]:
    card = Card(faults)
    generator, learner = Generator(card), WatchedLearner(Local("learner", Learner, [card]), 60.0)
    config = waiting(configure(memory={"layout": "shared"}, rollout={"workers": 1}), push=0.1, start=10.0)
    return build(folder, config, STEPS, workers=[generator], trainer=learner), card


CYCLE = ["detach", "start", "share_base", "attach", "take_policy"]
LOST = ActorDied("generator-0: process died during start")


@pytest.mark.parametrize(
    ("at", "events"),
    [
        ("nothing", CYCLE),
        ("start", ["detach", "start", *CYCLE]),
        ("share_base", ["detach", "start", "share_base", *CYCLE]),
        ("take_policy", [*CYCLE, *CYCLE]),
    ],
)
async def test_the_learner_lets_go_before_a_fresh_generator_starts(at: str, events: list[str], tmp_path: Path) -> None:
    run, card = run_of(tmp_path, {})
    begun = asyncio.create_task(run.finish())
    while not card.events:  # the first policy
        await asyncio.sleep(0)
    card.events.clear()
    card.faults[at] = LOST
    await begun
    assert [line["step"] for line in lines(tmp_path)] == list(range(STEPS + 1))
    after = card.events[card.events.index("detach") :]
    assert after[: len(events)] == events
    assert set(after[len(events) :]) <= {"take_policy"}
    assert card.mapped


@pytest.mark.parametrize("fault", ["attach", "detach"])
async def test_a_learner_that_cannot_take_it_ends_the_run_with_its_last_step_saved(fault: str, tmp_path: Path) -> None:
    error = WrongInput("memory.layout: shared: a fresh generator holds another base than the one before")
    run, card = run_of(tmp_path, {fault: RemoteError(f"learner: {fault}_base failed: {error}")})
    with pytest.raises(BaseException) as ended:
        await run.finish()
    assert isinstance(first(ended.value), LearnerError)
    assert "holds another base" in str(first(ended.value))
    assert card.events[-1] == fault


async def test_the_learners_answer_to_a_probe_may_take_as_long_as_a_fresh_generator(tmp_path: Path) -> None:
    run, card = run_of(tmp_path, {})
    card.mapped = False
    answer = asyncio.create_task(run.loop.sync._expect(0, (1, 2)))
    await asyncio.sleep(0.3)  # longer than deadlines.push
    assert not answer.done()
    card.mapped = True
    assert len((await answer).logprobs) == 1
