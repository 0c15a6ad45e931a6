"""How a run ends that fails: which steps are kept, and what is said last."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.actor import ActorDied, ClusterLost, Local, RemoteError, StartFailed, ValueLost
from cluster.files import writing
from learner.driver import checkpoint, failure
from learner.driver.loop import GuardStopped
from learner.driver.preflight import Prepared
from learner.driver.restarts import Restarts
from learner.driver.watched_learner import LearnerError, LearnerLost, WatchedLearner
from learner.trainer.service import TrainerService
from rollout.service import RolloutService
from rollout.supervised_worker import GivenUp
from tests.learner.checkpoints import commit
from tests.learner.loops import Trainer, Worker, build, configure, consumed, finish, first, lines


class Dying(Local[Any]):
    """A generator whose every process dies at the policy `version`, or at once with it."""

    def __init__(self, version: int) -> None:
        super().__init__("generator-0", Worker, [0.0, None])
        self.version = version

    async def call(self, method: Any, deadline_s: float, /, *args: Any, **kwargs: Any) -> Any:
        if method is RolloutService.take_policy and args[0].value.version >= self.version:
            raise ActorDied("generator-0: process died during take_policy")
        return await super().call(method, deadline_s, *args, **kwargs)


async def test_a_generator_that_is_given_up_costs_no_step(tmp_path: Path) -> None:
    """Checkpoints come every 100 steps; the sixth is under way when the generator is given up."""
    config = configure(max_staleness=1, checkpoint={"every": 100})
    loop = build(tmp_path, config, 50, workers=[Dying(5)], trainer_s=0.02)
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(loop)
    assert isinstance(first(caught.value), GivenUp)
    newest, skipped = checkpoint.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert not skipped
    trainer = loop.trainer._object  # type: ignore[attr-defined]
    assert checkpoint.step_of(newest) == loop.step == trainer.version >= 5
    assert [line["step"] for line in lines(tmp_path)] == list(range(loop.step + 1))
    assert len(consumed(tmp_path)) == loop.step

    resumed = build(tmp_path, config, loop.step + 3, resume_step=loop.step)
    await finish(resumed, newest)
    positions = [p for step in consumed(tmp_path) for p in step]
    assert len(positions) == len(set(positions)) == 3 * resumed.total_steps


async def test_what_runs_beside_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    loop = build(tmp_path, configure(checkpoint={"every": 100}), 10**6)

    async def beside() -> None:
        while loop.step < 3:
            await asyncio.sleep(0)
        raise ClusterLost("Ray's gcs_server (pid 1) has ended")

    with pytest.raises(BaseExceptionGroup):
        await loop.run(None, beside())
    loop.sinks.metrics.close()
    loop.sinks.timeline.close()
    newest, _ = checkpoint.newest(tmp_path / "checkpoints")
    assert newest is not None
    assert checkpoint.step_of(newest) == loop.step >= 3


class Failing(Trainer):
    """Its third step comes to no good end."""

    ends: BaseException | None = None

    async def step(self, groups: list[Any]) -> dict[str, float]:
        if self.version == 2:
            assert self.ends is not None
            raise self.ends
        return await super().step(groups)


@pytest.mark.parametrize(
    ("ends", "comes_out"),
    [(ActorDied("learner: died"), LearnerLost), (RemoteError("learner: step failed"), LearnerError)],
)
async def test_what_a_failed_learner_holds_is_not_saved(
    tmp_path: Path, ends: BaseException, comes_out: type[BaseException]
) -> None:
    failing = Local("learner", Failing, [0.0, 0.0])
    assert failing._object is not None
    failing._object.ends = ends
    loop = build(tmp_path, configure(checkpoint={"every": 100}), 9, trainer=WatchedLearner(failing, 60))
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(loop)
    assert type(first(caught.value)) is comes_out
    assert checkpoint.newest(tmp_path / "checkpoints") == (None, [])


class Stuck:
    """A learner whose calls last, and get on or not."""

    def __init__(self, gets_on: bool, answers: bool = True) -> None:
        self.gets_on, self.answers, self.looks = gets_on, answers, 0
        self.over = asyncio.Event()

    async def step(self) -> str:
        await self.over.wait()
        return "done"

    save = step

    async def pulse(self) -> float:
        if not self.answers:
            await asyncio.Event().wait()
        self.looks += 1
        if self.looks > 5 and self.gets_on:  # by then it has lasted for longer than anybody may be silent
            self.over.set()
        return float(self.looks * self.gets_on)


@pytest.mark.parametrize(
    ("method", "gets_on", "answers", "said"),
    [
        ("step", True, True, None),
        ("step", False, True, "^learner: step has not got on for 1 s: it hangs"),
        ("step", True, False, "^learner: step is without an answer, and so is its process, for 1 s: it hangs"),
        ("save", True, False, "^learner: save is without an answer"),
    ],
)
async def test_a_learner_that_hangs_is_told_from_one_that_takes_long(
    method: str, gets_on: bool, answers: bool, said: str | None
) -> None:
    learner = WatchedLearner(Local[Any]("learner", Stuck, [gets_on, answers]), silence_s=1.0)
    if said is None:
        assert await learner.call(getattr(TrainerService, method), 60) == "done"
    else:
        with pytest.raises(LearnerLost, match=said):
            await learner.call(getattr(TrainerService, method), 60)
    assert len(asyncio.all_tasks()) == 1  # nothing is left behind


async def test_a_call_that_tells_nothing_of_itself_is_held_by_its_deadline_alone() -> None:
    learner = WatchedLearner(Local[Any]("learner", Stuck, [False, True]), silence_s=0.4)
    with pytest.raises(LearnerLost, match="learner: save gave no answer within 2 s"):
        await learner.call(cast(Any, TrainerService.save), 2)


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (StartFailed("learner: no such layer", "no such layer", wrong_input=True), "learner: no such layer", 2),
        (
            StartFailed("learner: RuntimeError: no card", "no card", wrong_input=False),
            "learner: RuntimeError: no card",
            1,
        ),
        (GivenUp("\n  generator-0: lost\nremote traceback"), "generator-0: lost", 1),
        (KeyError("a"), "KeyError: 'a'", 1),
        (RuntimeError(), "RuntimeError", 1),
    ],
)
def test_the_last_line_is_the_cause(error: Exception, line: str, code: int) -> None:
    lost = ClusterLost("Ray's raylet has ended")
    assert failure.first_of(ExceptionGroup("a", [ExceptionGroup("b", [error, ValueError()])])) is error
    assert failure.first_of(ExceptionGroup("a", [error, ExceptionGroup("b", [lost])])) is lost
    text, exit_code = failure.tell(error)
    assert (text.splitlines()[-1], exit_code) == (f"error: {line}", code)


@pytest.mark.parametrize("kind", [GuardStopped, LearnerLost, ClusterLost])
def test_a_run_that_ends_for_a_reason_is_told_without_a_traceback(kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        raise kind("step 7: the mismatch is too large")
    assert failure.tell(caught.value) == ("error: step 7: the mismatch is too large", 1)


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space") as caught, writing(tmp_path / "metrics.jsonl"):
        os.write(os.open("/dev/full", os.O_WRONLY), b"x")
    text, code = failure.tell(caught.value)
    assert text.startswith(f"error: the disk of {tmp_path / 'metrics.jsonl'} is full (No space left on device); free")
    assert code == 1


def test_a_lost_learner_is_replaced_as_often_as_is_allowed_and_nothing_else_is(tmp_path: Path) -> None:
    notes: list[str] = []
    config = configure(learner={"groups_per_step": 3, "restarts": 3}, output_dir=str(tmp_path), name="r")
    old, absent = tmp_path / "elsewhere" / "step-000020", cast(Any, None)
    prepared = Prepared(config, absent, [], 40, old, 20, [], [], absent, absent)
    restarts = Restarts(prepared, notes.append)
    lost = ExceptionGroup("g", [LearnerLost("learner: step died\nmore")])
    assert not restarts.after(LearnerError("learner: step failed"), begun=True)
    assert not restarts.after(GivenUp("generator-0: lost"), begun=True)
    went_on = []
    for begun in (True, False, True):  # at first nothing was saved since the start
        assert restarts.after(lost, begun=begun)
        went_on.append((restarts.prepared.resume_from, restarts.prepared.finished_steps))
        newest = commit(tmp_path / "r" / "checkpoints", 24, {})
    assert went_on == [(old, 20), (old, 20), (newest, 24)]
    assert not restarts.after(lost, begun=True)
    assert notes[2] == "learner: step died; restart 3 of 3, with fresh processes, from step 24"
    assert len(notes) == 3
    fresh = Restarts(replace(prepared, resume_from=None, finished_steps=0), notes.append)
    gone = ValueLost("generator-0: take_policy: what it was sent is gone with the node that had it")
    assert fresh.after(gone, begun=False)
    assert notes[-1].endswith("restart 1 of 3, with fresh processes, from the start")
