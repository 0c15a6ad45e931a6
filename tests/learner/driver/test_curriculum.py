"""A run with data.curriculum, without a model: problems that teach come more often, and each position is trained on
once, by weights that follow from the rollouts which the run has kept, however often it is interrupted.
"""

import asyncio
import itertools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from benchmarks.system.local_run import VOCAB, local_run
from cluster.actor import Local
from learner.config import RunConfig
from learner.driver import checkpoint
from rollout import ledger
from rollout.data import curriculum
from rollout.data.curriculum import Curriculum, Estimates, draws, recorded
from rollout.fakes import make_problem
from rollout.schema import Problem, groups_of
from rollout.types import Sampling
from tests.learner.loops import PER_STEP, Built, Trainer, Worker, configure, consumed, finish

SIZE, SEED = 12, 5
FOLDER = "curriculum"


class Twelve:
    """Problems train-0 to train-11: a third is never solved, a third always, a third by chance."""

    def __len__(self) -> int:
        return SIZE

    def ids(self) -> list[str]:
        return [f"train-{index}" for index in range(SIZE)]

    def columns_of(self, indices: npt.NDArray[np.int64]) -> Iterator[Mapping[str, Any]]:
        return (make_problem(index).columns for index in indices.tolist())

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([SEED, epoch]).permutation(SIZE)

    def nth(self, index: int, position: int) -> Problem:
        ids = (index % VOCAB, 1, 5, 2)
        return Problem(f"train-{index}", f"question {index}", {"answer": "4"}, ids, position, position // SIZE)

    def at(self, position: int) -> Problem:
        return self.nth(int(self.order(position // SIZE)[position % SIZE]), position)


class Grader(Worker):
    async def rollout(self, problem: Problem, sampling: Sampling, attempt: int) -> pa.Table | None:
        group = await super().rollout(problem, sampling, attempt)
        third = int(problem.id.partition("-")[2]) % 3
        if group is None or third == 2:
            return group
        field = group.schema.field("reward")
        place = group.column_names.index("reward")
        return group.set_column(place, field, pa.array([float(third)] * len(group), field.type))


def config_of(*, dynamic_sampling: bool = False, **changed: Any) -> RunConfig:
    return configure(
        data={"path": "fake", "curriculum": "own", "eval": {"every": 0}},
        seed=SEED,
        rollout={"num_generations": 6, "dynamic_sampling": dynamic_sampling},
        checkpoint={"every": 1, "keep": 99},
        **changed,
    )


def build(folder: Path, config: RunConfig, steps: int, *, resume_step: int = 0, pace_s: float = 0.0) -> Built:
    folder.mkdir(exist_ok=True)
    made = local_run(
        folder, config, steps, problems=Twelve(), resumed_step=resume_step,
        generators=[Local(f"generator-{rank}", Grader, [pace_s, None]) for rank in range(2)],
        trainer=Local("learner", Trainer, [pace_s, 0.0]),
        curriculum=Curriculum(Twelve(), Estimates(SIZE), SEED, folder, None, "own"),
    )  # fmt: skip
    return Built(made.loop, made.pipes, made.sinks, made.trainer)


def positions_of(folder: Path) -> dict[int, str]:
    """Position -> the problem that the ledger has there, which no other group has."""
    groups = [group for path in ledger.steps(folder / "rollouts") for group in groups_of(ledger.read(path))]
    found = {int(one.column("position")[0].as_py()): str(one.column("problem_id")[0].as_py()) for one in groups}
    assert len(found) == len(groups)
    return found


def check_records(folder: Path) -> int:
    """Every recorded weight follows from the rollouts of the steps before it, and every problem of the ledger from a
    recorded weight. Returns the number of epochs that have records."""
    weights = {}
    for file in sorted((folder / FOLDER).glob("epoch-*.parquet")):
        kept = recorded(file)
        assert kept is not None
        by_hand = Curriculum(Twelve(), Estimates(SIZE), SEED, folder / "elsewhere", None, "own")
        for step, path in enumerate(ledger.steps(folder / "rollouts")[: kept.step], start=1):
            by_hand.learned(step, groups_of(ledger.read(path)))
        by_hand.at(0)
        again = recorded(folder / "elsewhere" / FOLDER / "epoch-000000.parquet")
        assert again is not None
        (epoch,) = kept.weights
        assert again.step == kept.step
        assert np.array_equal(again.weights[0], kept.weights[epoch])
        weights[epoch] = kept.weights[epoch]
    shutil.rmtree(folder / "elsewhere")
    for position, problem in positions_of(folder).items():
        epoch, place = divmod(position, SIZE)
        order = draws(Twelve().order(epoch), weights[epoch], [SEED, epoch, 1])
        assert problem == f"train-{order[place]}"
    return len(weights)


async def test_problems_that_are_sometimes_solved_come_more_often(tmp_path: Path) -> None:
    await finish(build(tmp_path, config_of(), 24))
    assert consumed(tmp_path) == [list(range(PER_STEP * step, PER_STEP * (step + 1))) for step in range(24)]
    assert check_records(tmp_path) >= 6  # the next may have begun
    by_epoch: list[list[str]] = [[] for _ in range(6)]
    for position, problem in positions_of(tmp_path).items():
        by_epoch[position // SIZE].append(problem)
    assert sorted(by_epoch[0]) == sorted(Twelve().ids())
    thirds = [[int(one.partition("-")[2]) % 3 for one in epoch] for epoch in by_epoch]
    assert thirds[0].count(2) == 4
    assert sum(epoch.count(2) for epoch in thirds[2:]) > 24  # of 48


async def test_a_run_that_is_killed_anywhere_goes_on_as_if_it_were_not(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    await finish(build(whole, config_of(), 10))
    assert check_records(whole) > 2
    for step in (1, 3, 4, 5, 8):  # records of steps and epochs after it lie there, as after a kill
        folder = tmp_path / f"killed-{step}"
        shutil.copytree(whole, folder)
        await finish(build(folder, config_of(), 10, resume_step=step), folder / "checkpoints" / f"step-{step:06d}")
        assert positions_of(folder) == positions_of(whole)
        for file in (whole / FOLDER).iterdir():
            assert (folder / FOLDER / file.name).read_bytes() == file.read_bytes()


async def test_groups_that_dynamic_sampling_replaces_count_too(tmp_path: Path) -> None:
    config = config_of(dynamic_sampling=True)
    await finish(build(tmp_path, config, 5))
    await finish(build(tmp_path, config, 9, resume_step=3), tmp_path / "checkpoints" / "step-000003")
    assert sum(map(len, consumed(tmp_path))) == len(positions_of(tmp_path)) > 9 * PER_STEP
    assert check_records(tmp_path) > 2


@pytest.mark.parametrize("moment", range(6))
async def test_a_run_that_generates_ahead_keeps_each_position_and_its_records_when_it_is_killed(
    tmp_path: Path, moment: int
) -> None:
    config = config_of(max_staleness=2)
    run, folder = build(tmp_path / "run", config, 99, pace_s=2e-3), tmp_path / "killed"
    running = asyncio.create_task(finish(run))
    for _ in range(2000):
        newest = checkpoint.newest(tmp_path / "run" / "checkpoints")[0]
        records = list((tmp_path / "run" / FOLDER).glob("epoch-*.parquet"))
        if newest is not None and len(records) > 1 + moment // 2:
            break
        await asyncio.sleep(1e-3)
    shutil.copytree(tmp_path / "run", folder)  # what a SIGKILL leaves: no end is awaited
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    newest = checkpoint.newest(folder / "checkpoints")[0]
    assert newest is not None
    step = checkpoint.step_of(newest)
    before = {one.name: one.read_bytes() for one in records_up_to(folder, step)}
    await finish(build(folder, config, step + 9, resume_step=step, pace_s=2e-3), newest)
    positions = list(itertools.chain(*consumed(folder)))
    assert len(set(positions)) == len(positions) == (step + 9) * PER_STEP
    assert check_records(folder) > 2
    for name, content in before.items():
        assert (folder / FOLDER / name).read_bytes() == content


def records_up_to(folder: Path, step: int) -> list[Path]:
    found = [(file, recorded(file)) for file in (folder / FOLDER).glob("epoch-*.parquet")]
    return [file for file, kept in found if kept is not None and 0 < kept.step <= step]


async def test_a_run_from_the_start_leaves_nothing_of_the_one_before(tmp_path: Path) -> None:
    await finish(build(tmp_path, config_of(), 10))
    shutil.rmtree(tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "rollouts")
    await finish(build(tmp_path, config_of(), 2))
    assert [file.name for file in (tmp_path / FOLDER).iterdir()] == ["epoch-000000.parquet"]


async def test_another_runs_checkpoint_brings_its_estimates_and_no_record_of_this_folder_counts(tmp_path: Path) -> None:
    await finish(build(tmp_path / "one", config_of(), 6))
    start = tmp_path / "one" / "checkpoints" / "step-000006"
    (tmp_path / "two").mkdir()
    known = Estimates(SIZE)
    known.add(3, [0.0] * 8)
    known.add(5, [0.0, 1.0])
    before = Curriculum(Twelve(), known, SEED, tmp_path / "two", None, "own")  # of a run that left no checkpoint
    for epoch in (1, 2, 3):
        before.at(epoch * SIZE)
    run = build(tmp_path / "two", config_of(), 10, resume_step=6)
    await finish(run, start)
    await finish(build(tmp_path / "one", config_of(), 10, resume_step=6), start)
    ours = {position: one for position, one in positions_of(tmp_path / "one").items() if position >= 6 * PER_STEP}
    assert positions_of(tmp_path / "two") == ours


async def test_a_checkpoint_of_a_run_without_one_can_be_continued_with_one(tmp_path: Path) -> None:
    plain = config_of()
    without = build(tmp_path, plain, 5)
    without.pipes.curriculum = None
    await finish(without)
    assert not (tmp_path / FOLDER).exists()
    newest = checkpoint.newest(tmp_path / "checkpoints")[0]
    assert newest is not None
    assert not (newest / curriculum.FILE).exists()
    await finish(build(tmp_path, plain, 9, resume_step=5), newest)
    positions = list(itertools.chain(*consumed(tmp_path)))
    assert positions == list(range(9 * PER_STEP))
