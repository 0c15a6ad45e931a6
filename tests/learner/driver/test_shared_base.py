"""A generator that owns the learner's base is lost, at each point: two bases never lie in memory at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.system.local_run import VOCAB
from cluster.actor import ActorDied, Local, Method, RemoteError
from cluster.errors import WrongInput
from learner.driver.failure import LearnerError, WatchedLearner
from rollout.delivery import Answer
from rollout.fakes import FakeEngine, FakeWorker
from rollout.types import Manifest
from tests.learner.loops import Trainer, build, configure, first, lines, waiting

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
