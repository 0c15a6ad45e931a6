"""The parts of the loop for themselves: probe tokens, when a run is done, one step and its faults, how long a wait for
groups may take, and a task for a group that has ended.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.actor import Unusable
from cluster.buffer import MAX_REFILLS
from learner.driver import checkpoint
from learner.driver.loop import LIFE, TOKENS, Probe, Schedule, start_in
from rollout.fakes import make_group
from rollout.producer import Cursor
from rollout.types import Completion
from tests.learner.loops import PER_STEP, PROMPT, build, configure, finish, first, waiting

# Probe tokens: of a prompt until something was trained on, then of a batch, for as long as they have more to say.


def completion(*tokens: int) -> Completion:
    return Completion(
        np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop", np.zeros(len(tokens), np.int32)
    )


def test_the_end_of_a_prompt_and_the_beginning_of_what_was_rewarded_most_differently() -> None:
    probe = Probe([5, 6, 7], longest=1000)
    assert list(probe.ids) == [5, 6, 7] * 21 + [5]
    dull = make_group(0, rewards=(1.0, 1.0))
    told = [completion(1), completion(*range(100)), completion(2)]
    group = make_group(1, completions=told, rewards=(0.0, 1.0, None), prompt_ids=[list(range(200, 300))] * 3)
    probe.trained_on([dull], settled=True)
    assert probe.ids[0] == 5
    probe.trained_on([dull, group], settled=False)
    assert len(probe.ids) == TOKENS
    # 0 and 1 are as far from their mean: the first of them, one token, after the end of the prompt.
    assert probe.ids == (*range(237, 300), 1)
    short = make_group(2, completions=told[1:], rewards=(0.0, 1.0), prompt_ids=[[8]] * 2)
    for _ in range(LIFE - 1):
        probe.trained_on([short], settled=True)
        assert probe.ids[-1] == 1
    probe.trained_on([short], settled=False)
    assert probe.ids[-1] == 1  # on these a frozen generator would not have shown yet
    probe.trained_on([dull], settled=True)
    assert probe.ids[-1] == 1
    probe.trained_on([short], settled=True)
    assert probe.ids == (8, *range(48), 8, *range(14))
    for _ in range(LIFE - 1):
        probe.trained_on([group], settled=True)
        assert probe.ids[0] == 8
    odd = make_group(3, completions=told, rewards=(1.0, 1.0, 0.0), prompt_ids=[[9]] * 3)
    probe.trained_on([odd], settled=True)
    assert probe.ids == (9, 2) * 32  # their life is over


def test_a_completion_alone_is_learned_from_if_it_has_a_reward() -> None:
    probe = Probe([5, 6, 7], longest=4)
    probe.trained_on([make_group(0, completions=[completion(1)], rewards=(None,))], settled=True)
    assert probe.ids == (5, 6, 7, 5)
    probe.trained_on([make_group(1, completions=[completion(1)], rewards=(0.0,), prompt_ids=[[8]])], settled=True)
    assert probe.ids == (8, 1, 8, 1)


def test_it_is_no_longer_than_what_an_engine_takes() -> None:
    probe = Probe([5, 6, 7], longest=10)
    assert probe.ids == (5, 6, 7) * 3 + (5,)
    probe.trained_on([make_group(0, rewards=(1.0, 0.0))], settled=False)
    assert probe.ids == (3, 1, 2, 0) * 2 + (3, 1)


@pytest.mark.parametrize("fewer", [0, 1, 2])
def test_the_first_probe_is_as_long_as_the_longest_prompt_with_its_completion_but_one(
    tmp_path: Path, fewer: int
) -> None:
    """Of whose last token an engine gives no logprob of a next one."""
    longest = {"max_prompt_length": TOKENS - 5 - fewer, "max_completion_length": 6}
    ids = build(tmp_path, configure(rollout=longest), 1).loop.sync.probe.ids
    assert len(ids) == TOKENS - fewer
    assert ids[:PROMPT] == (0, 1, 5, 2)  # the first problem's


def test_a_run_that_has_taken_all_its_steps_does_not_end_early() -> None:
    cursor = Cursor()
    schedule = Schedule(configure(), 2, cursor, problems=3)
    assert [schedule.early_end(step) for step in (0, 1, 2, 3)] == [None] * 4
    for position in range(3):
        cursor.finish(position)
    assert [bool(schedule.early_end(step)) for step in (0, 1, 2, 3)] == [True, True, False, False]
    assert str(schedule.early_end(1)).startswith("epochs: 3 problems were consumed by step 1, ")


# A task for a group that has ended: refused, and nothing is left that was never awaited.


async def test_work_that_a_group_no_longer_takes_is_closed() -> None:
    async def work() -> int:
        return 3

    async with asyncio.TaskGroup() as tasks:
        assert await start_in(tasks, work()) == 3
    late = work()
    with pytest.raises(RuntimeError):
        start_in(tasks, late)
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED


async def test_what_is_cut_short_by_a_stop_has_ended_before_the_run_goes_on(tmp_path: Path) -> None:
    run, ended = build(tmp_path, configure(), 1), list[bool]()

    async def slow_to_end() -> bool:
        try:
            return await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.02)
            ended.append(True)

    waiting_for = asyncio.create_task(run.loop._unless_stopped(slow_to_end()))
    await asyncio.sleep(0.01)
    run.stop.set()
    assert await waiting_for is None
    assert ended == [True]


# One step.


@pytest.mark.parametrize(("fails", "steps"), [("counted", 0), ("recorded", 1)])
async def test_a_step_is_kept_once_its_problems_are_counted_and_else_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, steps: int
) -> None:
    """Between the learner's step and the count of its problems the two are of different steps. What is known of a step
    that is kept is written, too."""
    run = build(tmp_path, configure(checkpoint={"every": 100}), 6)
    training = run.loop.training

    def fail(*_: Any) -> None:
        if run.step == steps:
            raise Unusable("a fault amid a step")

    if fails == "counted":
        monkeypatch.setattr(training._sync, "trained_on", fail)
    else:
        monkeypatch.setattr(training._record, "policy", fail)
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(run)
    assert isinstance(first(caught.value), Unusable)
    assert [one.name for one in checkpoint.listing(tmp_path / "checkpoints")] == ["step-000001"] * steps
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written if "reward/mean" in line and line["step"] > 0] == [1] * steps


async def test_reward_models_score_for_the_step_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = build(tmp_path, configure(), 3), list[int]()
    score = run.loop.training._reward_models.score

    async def noted(groups: Any, step: int) -> Any:
        asked.append(step)
        return await score(groups, step)

    monkeypatch.setattr(run.loop.training._reward_models, "score", noted)
    await finish(run)
    assert asked == [1, 2, 3]


# How long a wait for groups may take.


@pytest.mark.parametrize(("dynamic", "batches"), [(False, 1), (True, 1 + MAX_REFILLS)])
async def test_groups_are_waited_for_as_long_as_a_start_and_their_batches_take(
    dynamic: bool, batches: int, tmp_path: Path
) -> None:
    config = waiting(configure(rollout={"dynamic_sampling": dynamic}), start=0.02, group=0.001)
    run = build(tmp_path, config, 1)
    patience = 0.02 + batches * config.group_deadline_s
    with pytest.raises(TimeoutError, match=f"^step 5: waited {patience:g} s for {PER_STEP} groups; 0 lie in the"):
        await run.loop.batches.take(4)
