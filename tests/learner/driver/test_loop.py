"""The whole loop without a model: the real Loop, Producers and pipes, between a fake engine and a fake trainer."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cluster.actor import ActorDied, ClusterLost, Local, Unusable
from cluster.files import WriteFailed
from learner.driver import checkpoint, loop
from learner.driver.evaluate import Evaluation
from learner.driver.loop import MOST_UNSCORED
from learner.driver.metrics import unscored
from rollout import ledger
from rollout.delivery import Answer
from rollout.schema import Problem, build_group
from rollout.service import RolloutService
from rollout.types import Sampling
from tests.learner.loops import (
    PER_STEP,
    PROBLEMS,
    Built,
    Trainer,
    Worker,
    build,
    configure,
    consumed,
    finish,
    first,
    lines,
    started,
    waiting,
)  # fmt: skip


async def test_synchronous_training_takes_each_position_in_order_from_the_newest_policy(tmp_path: Path) -> None:
    await finish(build(tmp_path, configure(), 5, pace_s=1e-4))
    assert consumed(tmp_path) == [list(range(3 * step, 3 * step + 3)) for step in range(5)]
    written = lines(tmp_path)
    assert [line["step"] for line in written] == [0, 1, 2, 3, 4, 5]
    assert [line["step"] for line in written if "eval/accuracy" in line] == [0, 2, 4, 5]
    assert [line["policy/staleness_max"] for line in written[1:]] == [0.0] * 5
    assert [line["loss/total"] for line in written[1:]] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert written[-1]["buffer/dropped_stale"] == 0
    told = ("time/push_load", "time/push_probe", "memory/generator_peak", "time/push_export", "time/push_learner_probe")
    assert [[line[key] for key in told] for line in written[1:]] == [[2.0, 3.0, 1.0, 4.0, 5.0]] * 5
    saved = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert saved == ["step-000002", "step-000004", "step-000005"]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_text() == "5"


async def test_asynchronous_training_overlaps_and_keeps_its_bound(tmp_path: Path) -> None:
    await finish(build(tmp_path, configure(max_staleness=2), 12, pace_s=1e-3, trainer_s=4e-3))
    written = lines(tmp_path)[1:]
    assert max(line["policy/staleness_max"] for line in written) == 2  # the room is used, and not more
    assert sum(line["time/overlap"] for line in written) > 0
    positions = list(itertools.chain(*consumed(tmp_path)))
    assert len(set(positions)) == len(positions) == 12 * PER_STEP
    assert max(positions) < (12 + 3) * PER_STEP  # nothing was left behind but what is in flight


async def test_a_stopped_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    loop = build(tmp_path, configure(), 100, pace_s=1e-3)
    running = await started(loop, 3)
    loop.stop.set()
    await running
    newest, skipped = checkpoint.newest(tmp_path / "checkpoints")
    assert newest == tmp_path / "checkpoints" / f"step-{loop.step:06d}"
    assert not skipped
    total = loop.step + 4
    assert total < 100

    resumed = build(tmp_path, configure(), total, resume_step=loop.step)
    await finish(resumed, newest)
    assert [line["step"] for line in lines(tmp_path)] == list(range(total + 1))
    assert list(itertools.chain(*consumed(tmp_path))) == list(range(total * PER_STEP))
    assert [e.step for e in resumed.evaluations] == [0, *range(2, total, 2), total]


async def test_a_checkpoint_between_groups_that_overtook_each_other_loses_and_repeats_none(tmp_path: Path) -> None:
    never = {"path": "fake", "eval": {"every": 0}}  # meanwhile all groups would be done
    config = configure(max_staleness=2, checkpoint={"every": 1, "keep": 99}, data=never)
    for pace_s in (4e-3, 16e-3, 64e-3):  # a busy machine may be slower than all of them
        tmp_path = tmp_path / "run"
        tmp_path.mkdir()
        await finish(build(tmp_path, config, 8, pace_s=pace_s, trainer_s=1e-3))
        folders = sorted((tmp_path / "checkpoints").iterdir())
        states = {folder: json.loads((folder / "state.json").read_text()) for folder in folders}
        if gaps := [folder for folder in folders if states[folder]["cursor"]["done"]]:
            break
    resume_from = gaps[len(gaps) // 2]  # some positions above the first one that is not done are done
    resumed = build(tmp_path, config, 12, resume_step=states[resume_from]["step"], pace_s=4e-3, trainer_s=1e-3)
    await finish(resumed, resume_from)
    positions = list(itertools.chain(*consumed(tmp_path)))
    assert len(set(positions)) == len(positions) == 12 * PER_STEP
    done: Any = resumed.pipes.cursor.state()["done"]
    assert {*range(resumed.pipes.cursor.low), *done} == set(positions)


async def test_steps_that_a_kill_undid_are_taken_again_alike(tmp_path: Path) -> None:
    await finish(build(tmp_path, configure(), 5))
    before = [ledger.read(path) for path in ledger.steps(tmp_path / "rollouts")]
    resumed = build(tmp_path, configure(), 6, resume_step=2)
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    await finish(resumed, tmp_path / "checkpoints" / "step-000002")
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4, 5, 6]
    after = [ledger.read(path) for path in ledger.steps(tmp_path / "rollouts")]
    assert len(after) == len(ledger.steps(tmp_path / "mismatch")) == 6
    for old, new in zip(before, after, strict=False):
        assert old.drop_columns("created_at").equals(new.drop_columns("created_at"))


async def test_groups_that_are_lost_with_their_generator_are_begun_anew_and_counted(tmp_path: Path) -> None:
    calls = itertools.count(1)

    class Mortal(Worker):
        async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
            if sampling.n > 1 and next(calls) == 5:  # not in an evaluation
                raise Unusable("killed")
            return await super().rollout(problem, sampling, attempt)

    await finish(build(tmp_path, configure(), 4, workers=[Local("generator-0", Mortal, [1e-4, None])]))
    rows = [row for path in ledger.steps(tmp_path / "rollouts") for row in ledger.read(path).to_pylist()]
    again = {row["position"] for row in rows if row["attempt"] == 1}
    assert again
    assert [line["rollout/begun_anew"] for line in lines(tmp_path)[1:]] == [0, *[len(again)] * 3]
    assert [line["rollout/restarts"] for line in lines(tmp_path)[1:]] == [0, 1, 1, 1]
    for line in lines(tmp_path)[1:]:
        assert line["rollout/tokens"] > 0
        assert line["rollout/tokens_per_s"] * line["time/step"] == pytest.approx(line["rollout/tokens"])


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_dynamic_sampling_trains_on_signal_only_and_counts_each_problem_once(
    tmp_path: Path, max_staleness: int
) -> None:
    loop = build(tmp_path, configure(rollout={"dynamic_sampling": True}, max_staleness=max_staleness), 4, pace_s=1e-4)
    await finish(loop)
    learned = loop.trainer._object.learned  # type: ignore[attr-defined]
    assert [len(groups) for groups in learned] == [PER_STEP] * 4
    assert all(len(set(group.column("reward").to_pylist())) > 1 for groups in learned for group in groups)
    refilled = sum(line["rollout/refilled_groups"] for line in lines(tmp_path)[1:])
    assert refilled > 0
    positions = list(itertools.chain(*consumed(tmp_path)))
    assert len(set(positions)) == len(positions) == 4 * PER_STEP + refilled
    done: Any = loop.pipes.cursor.state()["done"]
    assert {*range(loop.pipes.cursor.low), *done} == set(positions)


@pytest.mark.parametrize("dynamic_sampling", [False, True])
async def test_epochs_count_the_problems_that_were_replaced_and_the_end_is_that_of_any_run(
    tmp_path: Path, dynamic_sampling: bool
) -> None:
    steps = -(-PROBLEMS // PER_STEP)  # without any replaced
    config = configure(epochs=1.0, rollout={"dynamic_sampling": dynamic_sampling})
    loop = build(tmp_path, config, steps, pace_s=1e-4)
    await finish(loop)
    assert loop.step < steps if dynamic_sampling else loop.step == steps
    positions = sorted(itertools.chain(*consumed(tmp_path)))
    assert positions == list(range(len(positions)))
    last = sum(len(step) for step in consumed(tmp_path)[:-1])
    assert last < PROBLEMS <= len(positions)  # each once, and no step after that
    assert "eval/accuracy" in lines(tmp_path)[-1]
    assert checkpoint.newest(tmp_path / "checkpoints")[0] == tmp_path / "checkpoints" / f"step-{loop.step:06d}"


def nobody_scores(positions: Callable[[int], bool], status: str = "none") -> type[Worker]:
    """A worker whose reward functions give None for every completion of the problems at these positions, or fail."""

    class Selective(Worker):
        async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
            group = await super().rollout(problem, sampling, attempt)
            if group is None or sampling.n == 1 or not positions(problem.position):
                return group
            return with_none(group, status)

    return Selective


def with_none(group: pa.Table, status: str) -> pa.Table:
    columns = {name: group.column(name).to_pylist() for name in group.column_names}
    columns |= {"reward": [None] * len(group), "reward_status": [status] * len(group)}
    columns["reward_parts"] = [[{"name": "odd", "value": None}]] * len(group)
    return build_group(columns)


@pytest.mark.parametrize(
    ("changed", "none", "passed"),
    [
        ({}, lambda position: 3 <= position < 6 or 9 <= position < 15, [0, 3, 6, 0, 0]),
        ({"max_staleness": 2}, lambda position: position % 2 == 1 or position in (4, 6, 8, 10, 12), None),
        ({"rollout": {"dynamic_sampling": True}}, lambda position: position < 2 * PER_STEP, None),
        ({"name": "alternating"}, lambda position: position < 2 * PER_STEP, [6, 0, 0, 0, 0]),
    ],
)
async def test_a_batch_without_any_reward_is_counted_and_another_one_taken_in_its_place(
    tmp_path: Path,
    changed: dict[str, Any],
    none: Callable[[int], bool],
    passed: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = [Local(f"generator-{rank}", nobody_scores(none), [1e-4, None]) for rank in range(2)]
    loop = build(tmp_path, configure(**changed), 5, workers=workers, alternating="name" in changed)
    noted: list[str] = []
    monkeypatch.setattr(loop.loop.metrics, "note", noted.append)
    await finish(loop)
    told = [line for line in noted if "has a reward (each function gave None), so it is passed over" in line]
    assert len(told) == ("rollout" not in changed)  # dynamic sampling replaces such groups before a batch is made
    learned = loop.trainer._object.learned  # type: ignore[attr-defined]
    assert [len(groups) for groups in learned] == [PER_STEP] * 5
    assert not any(unscored(groups) for groups in learned)
    counted = [line["rollout/unscored_groups"] for line in lines(tmp_path)[1:]]
    assert passed is None or counted == passed
    positions = list(itertools.chain(*consumed(tmp_path)))
    replaced = sum(line["rollout/refilled_groups"] for line in lines(tmp_path)[1:])
    assert len(set(positions)) == len(positions) == 5 * PER_STEP + sum(counted) + replaced
    done: Any = loop.pipes.cursor.state()["done"]
    assert {*range(loop.pipes.cursor.low), *done} == set(positions)
    assert max(line["policy/staleness_max"] for line in lines(tmp_path)[1:]) <= changed.get("max_staleness", 0)


@pytest.mark.parametrize("steps_before", [0, 2])
async def test_a_run_that_nobody_scores_ends_with_a_checkpoint_and_goes_on_behind_what_it_passed_over(
    tmp_path: Path, steps_before: int
) -> None:
    first_none = steps_before * PER_STEP
    last_none = first_none + (MOST_UNSCORED + 2) * PER_STEP  # more than one start passes over
    workers = [Local("generator-0", nobody_scores(lambda position: first_none <= position < last_none), [0.0, None])]
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(build(tmp_path, configure(), steps_before + 2, workers=workers))
    assert re.match(
        r"rewards: must score some completions: of 10 batches in a row, 60 completions, no", str(first(caught.value))
    )
    assert sorted(consumed(tmp_path)[-1]) == list(range(first_none, first_none + MOST_UNSCORED * PER_STEP))
    newest, _ = checkpoint.newest(tmp_path / "checkpoints")
    assert newest == tmp_path / "checkpoints" / f"step-{steps_before:06d}"

    resumed = build(tmp_path, configure(), steps_before + 2, resume_step=steps_before, workers=workers)
    await finish(resumed, newest)
    written = lines(tmp_path)
    assert [line["step"] for line in written] == list(range(steps_before + 3))
    assert written[steps_before + 1]["rollout/unscored_groups"] == 2 * PER_STEP
    assert "eval/accuracy" in written[0]
    assert resumed.pipes.cursor.low == last_none + 2 * PER_STEP


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("status", ["error", "timeout", "environment"])
async def test_a_run_that_ends_by_failing_rewards_does_not_meet_the_same_batch_when_it_goes_on(
    tmp_path: Path, steps_before: int, status: str
) -> None:
    bad = range(steps_before * PER_STEP, (steps_before + 1) * PER_STEP)
    workers = [Local("generator-0", nobody_scores(bad.__contains__, status), [0.0, None])]
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(build(tmp_path, configure(), steps_before + 2, workers=workers))
    assert re.match(rf"6 of 6 completions of this batch have no reward \({{'{status}': 6}}\)", str(first(caught.value)))
    newest, _ = checkpoint.newest(tmp_path / "checkpoints")
    assert newest == tmp_path / "checkpoints" / f"step-{steps_before:06d}"

    resumed = build(tmp_path, configure(), steps_before + 2, resume_step=steps_before, workers=workers)
    await finish(resumed, newest)
    assert [line["step"] for line in lines(tmp_path)] == list(range(steps_before + 3))
    assert resumed.pipes.cursor.low == bad.stop + 2 * PER_STEP


async def test_epochs_that_batches_without_a_reward_use_up_end_with_an_evaluation(tmp_path: Path) -> None:
    config = configure(epochs=1.0, data={"path": "fake", "eval": {"every": 3}})
    workers = [Local("generator-0", nobody_scores(lambda position: position >= 4 * PER_STEP), [0.0, None])]
    loop = build(tmp_path, config, -(-PROBLEMS // PER_STEP), workers=workers)
    await finish(loop)
    assert loop.step == 4
    assert "eval/accuracy" in lines(tmp_path)[-1]
    state = json.loads((tmp_path / "checkpoints" / "step-000004" / "state.json").read_text())
    assert state["cursor"]["low"] >= PROBLEMS


async def test_no_step_is_asked_for_before_the_probe_of_the_policy_before_it_is_answered(tmp_path: Path) -> None:
    """An actor may take two calls in either order, and a probe after the step would be of the policy after it."""

    class Late(Trainer):
        probed = -1

        async def probe(self, token_ids: list[int]) -> Answer:
            await asyncio.sleep(0.05)
            self.probed = self.version
            return await super().probe(token_ids)

        async def step(self, groups: list[pa.Table]) -> dict[str, float]:
            assert self.probed == self.version
            return await super().step(groups)

    await finish(build(tmp_path, configure(max_staleness=1), 4, trainer=Local("learner", Late, [0.0, 0.0])))


async def test_a_run_is_stopped_amid_an_evaluation_which_is_made_up_when_it_goes_on(tmp_path: Path) -> None:
    loop = build(tmp_path, configure(), 6)

    async def waits(step: int) -> dict[str, float]:
        if step < 2:
            return {}
        loop.loop.stop.set()
        await asyncio.Event().wait()
        raise AssertionError

    loop.loop.held_out.score = waits  # type: ignore[method-assign]
    await asyncio.wait_for(finish(loop), 20)
    newest, _ = checkpoint.newest(tmp_path / "checkpoints")
    assert newest == tmp_path / "checkpoints" / "step-000002"
    resumed = build(tmp_path, configure(), 4, resume_step=2)
    await finish(resumed, newest)
    assert [evaluation.step for evaluation in resumed.evaluations] == [2, 4]


async def test_an_evaluation_that_ended_a_run_is_made_up_when_it_goes_on(tmp_path: Path) -> None:
    loop = build(tmp_path, configure(), 6)
    score = loop.loop.held_out.score

    async def fails(step: int) -> dict[str, float]:
        if step == 2:
            raise RuntimeError("in the evaluation")
        return await score(step)

    loop.loop.held_out.score = fails  # type: ignore[method-assign]
    with pytest.raises(BaseExceptionGroup):
        await finish(loop)
    newest, _ = checkpoint.newest(tmp_path / "checkpoints")
    assert newest == tmp_path / "checkpoints" / "step-000002"
    resumed = build(tmp_path, configure(), 6, resume_step=2)
    await finish(resumed, newest)
    assert [evaluation.step for evaluation in resumed.evaluations] == [0, 2, 4, 6]
    written = lines(tmp_path)
    assert [line["step"] for line in written] == list(range(7))
    assert [line["step"] for line in written if "eval/accuracy" in line] == [0, 2, 4, 6]
    assert written[2]["loss/total"] == 2.0


def scored(loop: Built, accuracies: list[float]) -> Built:
    """With these as eval/accuracy of steps 0, 2, 4, ..."""

    async def score(step: int) -> dict[str, float]:
        loop.evaluations.append(Evaluation(step, {"eval/accuracy": accuracies[step // 2]}, []))
        return loop.evaluations[-1].metrics

    loop.loop.held_out.score = score  # type: ignore[method-assign]
    return loop


def kept(folder: Path) -> list[int]:
    return [checkpoint.step_of(one) for one in checkpoint.listing(folder / "checkpoints")]


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.1, 0.5, 0.7, 0.6, 0.7, 0.2], [4, 10]),  # the first of two that are equal
        ([0.9, 0.5, 0.7, 0.6, 0.7, 0.2], [10]),  # the start was best, and has no checkpoint
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [10]),
    ],
)
async def test_the_best_checkpoint_stays_beside_the_newest(
    tmp_path: Path, accuracies: list[float], expected: list[int]
) -> None:
    config = configure(checkpoint={"every": 5, "keep": 1, "best": True})
    await finish(scored(build(tmp_path, config, 10), accuracies))
    assert kept(tmp_path) == expected
    without = configure(checkpoint={"every": 5, "keep": 1})
    (tmp_path / "without").mkdir()
    await finish(scored(build(tmp_path / "without", without, 10), accuracies))
    assert kept(tmp_path / "without") == [10]


@pytest.mark.parametrize(
    ("early_stop", "accuracies", "last"),
    [
        ({"patience": 2}, [0.1, 0.5, 0.4, 0.5, 0.9, 0.9], 6),
        ({"patience": 2}, [0.1, 0.5, 0.4, 0.6, 0.5, 0.5], 10),
        ({"patience": 1}, [0.5, 0.5, 0.9, 0.9, 0.9, 0.9], 2),
        ({"accuracy": 0.6}, [0.1, 0.5, 0.6, 0.7, 0.8, 0.9], 4),
        ({"accuracy": 0.1}, [0.1, 0.5, 0.6, 0.7, 0.8, 0.9], 0),
    ],
)
async def test_a_run_ends_early_with_a_checkpoint_and_stays_ended(
    tmp_path: Path, early_stop: dict[str, Any], accuracies: list[float], last: int
) -> None:
    config = configure(early_stop=early_stop, checkpoint={"every": 50})
    await finish(scored(build(tmp_path, config, 10), accuracies))
    assert kept(tmp_path) == ([last] if last else [])
    assert [line["step"] for line in lines(tmp_path)] == list(range(last + 1))
    if 0 < last < 10:
        newest, _ = checkpoint.newest(tmp_path / "checkpoints")
        resumed = scored(build(tmp_path, config, 10, resume_step=last), accuracies)
        await finish(resumed, newest)
        assert resumed.step == last
        assert len(lines(tmp_path)) == last + 1


async def test_the_guard_stops_a_run_that_learns_from_what_it_would_not_have_sampled(tmp_path: Path) -> None:
    loop = build(tmp_path, configure(), 100, mismatch_k3=0.02)
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(loop)
    assert "step 8: policy/mismatch_k3: must be at most guard.mismatch_k3=0.01" in str(first(caught.value))
    assert checkpoint.newest(tmp_path / "checkpoints")[0] == tmp_path / "checkpoints" / "step-000008"


async def test_an_adapter_that_never_took_effect_stops_the_run(tmp_path: Path) -> None:
    workers = [Local("generator-0", Worker, [0.0, None]), Local("generator-1", Worker, [0.0, 3])]
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(build(tmp_path, configure(), 6, workers=workers))
    error = first(caught.value)
    assert type(error) is RuntimeError
    assert str(error).startswith("generator-1: acknowledged v3, but its engine computes with other tensors")
    assert len(consumed(tmp_path)) == 3  # nothing was learned after that


@pytest.mark.parametrize(("lost", "waits"), [(ClusterLost("Ray's raylet has ended"), 7), (Unusable("a fault"), 41)])
async def test_a_lost_cluster_leaves_some_seconds_for_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: Exception, waits: float
) -> None:
    """Ray ends the processes soon, so the run does not wait as long as for another checkpoint."""
    monkeypatch.setattr(loop, "LOST_S", 7)
    patience: list[float] = []

    def within(seconds: float) -> asyncio.Timeout:
        patience.append(seconds)
        return asyncio.timeout(0.05)

    run = build(tmp_path, waiting(configure(), step=41), 6)

    async def fails() -> None:
        monkeypatch.setattr(loop, "within", within)
        raise lost

    async def never() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(run.loop.training, "settled", never)
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.timeout(10):
            await run.run(None, fails())
    assert first(caught.value) is lost
    assert patience[-1] == waits


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            WriteFailed(errno.ENOSPC, "", "/runs/a"),
            "the disk of /runs/a is full ([Errno 28] : '/runs/a'); free some of it",
        ),
        (ValueError("odd"), "odd"),
        (RuntimeError(), "RuntimeError"),
    ],
)
async def test_a_checkpoint_that_cannot_be_written_when_a_run_fails_is_noted_beside_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Exception, said: str
) -> None:
    run = build(tmp_path, configure(checkpoint={"every": 100}), 6)
    noted: list[str] = []
    monkeypatch.setattr(run.loop.metrics, "note", noted.append)

    async def failing() -> None:
        while run.step < 2:
            await asyncio.sleep(1e-3)
        raise Unusable("a fault beside the run")

    async def save(*_: Any) -> None:
        raise wrong

    monkeypatch.setattr(run.checkpoints, "save", save)
    with pytest.raises(BaseExceptionGroup) as caught:
        await run.run(None, failing())
    assert isinstance(first(caught.value), Unusable)
    assert noted == [f"no checkpoint of step {run.step} could be written: {said}"]


async def test_a_run_that_fails_behind_its_first_step_keeps_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build(tmp_path, configure(checkpoint={"every": 100}), 6)
    write = run.loop.metrics.write

    def fails_once(step: int, metrics: dict[str, float]) -> None:
        write(step, metrics)
        if step == 1:
            raise Unusable("a fault behind step 1")

    monkeypatch.setattr(run.loop.metrics, "write", fails_once)
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(run)
    assert isinstance(first(caught.value), Unusable)
    assert kept(tmp_path) == [run.step] == [1]


async def test_the_trace_says_who_did_what(tmp_path: Path) -> None:
    await finish(build(tmp_path, configure(max_staleness=1), 4))
    events = json.loads((tmp_path / "timeline.json").read_text())
    found = {(event["name"], event.get("tid")) for event in events}
    assert found == {
        ("process_name", None),
        *((what, "loop") for what in ("wait", "evaluate", "checkpoint")),
        *((what, "learner") for what in ("policy", "train", "probe")),
        *((what, f"generator-{rank}") for what in ("push", "prove", "generate") for rank in (0, 1)),
    }
    told = {
        what: [event["args"][name] for event in events if event["name"] == what]
        for what, name in (("wait", "step"), ("policy", "version"))
    }
    assert told == {"wait": [1, 2, 3, 4], "policy": [1, 2, 3, 4]}
    assert {event["args"]["version"] for event in events if event["name"] == "probe"} == {0, 1, 2, 3, 4}


async def test_nothing_of_a_run_that_failed_outlives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that takes its time to end would write to a trace that is closed by then."""
    workers = [Local("generator-0", Worker, [0.0, None]), Local("generator-1", Worker, [0.0, 1])]
    loop = build(tmp_path, configure(), 6, workers=workers)
    take, ended = loop.pipes.buffer.take, list[bool]()

    async def slow_to_end(*how: Any) -> Any:
        if loop.step == 0:
            return await take(*how)
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(100):
                await asyncio.sleep(0)
            ended.append(True)

    monkeypatch.setattr(loop.pipes.buffer, "take", slow_to_end)
    with pytest.raises(BaseExceptionGroup):
        await finish(loop)
    assert ended == [True]
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Stuck(Local[Any]):
    """Dies of the second policy, and never comes back."""

    async def call(self, method: Any, deadline_s: float, /, *args: Any, **kwargs: Any) -> Any:
        if method is RolloutService.take_policy and args[0].value.version == 1:
            raise ActorDied(self.name)
        return await super().call(method, deadline_s, *args, **kwargs)

    async def revive(self, deadline_s: float) -> None:
        await asyncio.Event().wait()


async def test_a_late_acknowledgement_ends_the_wait_for_groups(tmp_path: Path) -> None:
    config = waiting(configure(), push=0.1, start=0.1, group=250)
    with pytest.raises(BaseExceptionGroup) as caught:
        await finish(build(tmp_path, config, 6, workers=[Stuck("generator-0", Worker, [0.0, None])]))
    assert "policy v1 not acknowledged after 0.2 s by generator-0 (holds v0)" in str(first(caught.value))


async def test_a_generator_for_which_there_is_no_slot_keeps_nobody_waiting(tmp_path: Path) -> None:
    config = configure(learner={"groups_per_step": 1}, data={"path": "fake", "eval": {"every": 0}})
    async with asyncio.timeout(10):
        await finish(build(tmp_path, config, 2))
    assert len(consumed(tmp_path)) == 2
