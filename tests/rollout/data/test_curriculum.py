"""data.curriculum: weights from past scores by hand, draws as often as the weights say, and an order that is a function
of seed, epoch and recorded weights.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import WrongInput
from cluster.files import WriteFailed
from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tokenizer
from rollout import ledger
from rollout.config import DataConfig, EvalConfig
from rollout.data import curriculum
from rollout.data.chat import Chat
from rollout.data.curriculum import FLOOR, Curriculum, Estimates, draws, estimates_from, forget_after, recorded
from rollout.data.problems import Problems, load
from rollout.fakes import make_group, make_problem
from rollout.schema import Problem

SIZE = 10
SCORES = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=6)


class Numbered:
    """Problems train-0 to train-9; an epoch's order turns by one."""

    def __len__(self) -> int:
        return SIZE

    def ids(self) -> list[str]:
        return [f"train-{index}" for index in range(SIZE)]

    def columns_of(self, indices: npt.NDArray[np.int64]) -> Iterator[Mapping[str, Any]]:
        return (make_problem(index).columns for index in indices.tolist())

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.roll(np.arange(SIZE), epoch)

    def nth(self, index: int, position: int) -> Problem:
        problem = make_problem(index)
        return Problem(problem.id, problem.messages, problem.columns, problem.prompt_ids, position, position // SIZE)


def made(folder: Path, seed: int = 0, start: Estimates | None = None, source: str = "own") -> Curriculum:
    return Curriculum(Numbered(), start or Estimates(SIZE), seed, folder, None, source)


def group(index: int, position: int, rewards: Sequence[float | None]) -> pa.Table:
    return make_group(position, rewards=rewards, problem_id=[f"train-{index}"] * len(rewards))


def stream(order: Curriculum, epoch: int) -> list[str]:
    return [order.at(position).id for position in range(SIZE * epoch, SIZE * (epoch + 1))]


def test_weights_by_hand() -> None:
    known = Estimates(5)
    known.add(0, [0.0] * 8)
    known.add(1, [1.0, 1.0, 0.0, 0.0])
    known.add(2, [1.0, 1.0, 1.0, 0.0])
    known.add(3, [None, math.nan])
    # With a quarter of a completion of 0 and one of 1: 4 p (1 - p) for p = 0.25 / 8.5, 2.25 / 4.5 and 3.25 / 4.5.
    assert known.weights() == pytest.approx([4 * 0.25 * 8.25 / 8.5**2, 1, 4 * 3.25 * 1.25 / 4.5**2, 1, 1])
    known.add(0, [0.0] * 8)  # 0.25 / 12.5: the first eight count half
    assert known.weights()[0] == pytest.approx(4 * 0.25 * 12.25 / 12.5**2)
    known.add(1, [1.0] * 4)  # 2 of 4 count half, then 4 of 4: 5.25 / 6.5
    assert known.weights()[1] == pytest.approx(4 * 5.25 * 1.25 / 6.5**2)


def test_scores_between_the_lowest_and_the_highest_count_by_their_spread() -> None:
    known = Estimates(3)
    known.add(0, [0.5] * 99)  # never other than half right: there is nothing to learn, though half the score is won
    known.add(1, [0.0, 1.0] * 50)
    known.add(2, [0.4, 0.6] * 50)
    assert known.weights()[0] == FLOOR
    assert known.weights()[1] == pytest.approx(1)
    assert known.weights()[2] == FLOOR  # a spread of 0.2 is 4 % of the greatest variance


def test_without_any_difference_all_weights_are_equal() -> None:
    known = Estimates(3)
    known.add(1, [0.0] * 8)
    assert known.weights().tolist() == [1, 1, 1]


def test_a_problem_that_was_never_solved_is_tried_now_and_then_for_ever() -> None:
    known = Estimates(96)
    for _ in range(200):
        known.add(0, [0.0] * 64)
        known.add(1, [0.0, 1.0] * 32)
    weights = known.weights()
    assert weights[0] == FLOOR == weights.min()
    times = sum((draws(np.arange(96), weights, [5, epoch, 1]) == 0).sum() for epoch in range(2000))
    assert times >= 0.8 * FLOOR * 2000


@given(
    st.lists(st.tuples(st.integers(0, 4), SCORES), min_size=1, max_size=12),
    st.sampled_from([0.5, 2.0, 100.0]), st.sampled_from([-7.0, 0.0, 3.0]),
)  # fmt: skip
def test_neither_the_unit_of_the_scores_nor_where_they_begin_matters(
    groups: list[tuple[int, list[float]]], unit: float, begin: float
) -> None:
    one, other = Estimates(5), Estimates(5)
    for index, scores in groups:
        one.add(index, scores)
        other.add(index, [begin + unit * score for score in scores])
    assert one.weights() == pytest.approx(other.weights(), abs=1e-9)
    assert one.weights().min() >= FLOOR
    assert one.weights().max() <= 1


@given(st.lists(st.floats(FLOOR, 1), min_size=1, max_size=40), st.integers(0, 2**32 - 1), st.integers(0, 99))
def test_each_problem_occurs_as_often_as_its_weight_says_up_to_one(weights: list[float], seed: int, epoch: int) -> None:
    order = np.random.default_rng(seed).permutation(len(weights))
    found = draws(order, np.array(weights), [seed, epoch, 1])
    assert np.array_equal(found, draws(order, np.array(weights), [seed, epoch, 1]))
    expected = np.array(weights) * len(weights) / sum(weights)
    counts = np.bincount(found, minlength=len(weights))
    assert counts.sum() == len(weights)
    assert (counts >= np.floor(expected - 1e-9)).all()
    assert (counts <= np.ceil(expected + 1e-9)).all()


@given(st.integers(1, 60), st.integers(0, 2**32 - 1), st.floats(FLOOR, 1))
def test_equal_weights_give_the_order_without_weights(size: int, seed: int, weight: float) -> None:
    order = np.random.default_rng(seed).permutation(size)
    assert np.array_equal(draws(order, np.full(size, weight), [seed, 3, 1]), order)


def test_frequencies_over_many_epochs_are_those_of_the_weights() -> None:
    rng, epochs = np.random.default_rng(0), 3000
    weights = rng.uniform(FLOOR, 1, 30)
    counts = np.zeros(30)
    for epoch in range(epochs):
        counts += np.bincount(draws(rng.permutation(30), weights, [0, epoch, 1]), minlength=30)
    expected = 30 * weights / weights.sum()
    assert np.abs(counts / epochs - expected).max() < 4.5 * math.sqrt(0.25 / epochs)  # most for a count of two values


def test_what_occurs_several_times_is_spread_over_the_epoch() -> None:
    weights = np.full(40, 0.1)
    weights[7] = 1  # 40 / 4.9 times
    found = np.flatnonzero(draws(np.arange(40), weights, [0, 0, 1]) == 7)
    assert len(found) in (8, 9)
    assert np.diff(found).min() >= 3


def test_weights_change_between_epochs_only_and_are_on_the_disk_before_a_position_is_issued(tmp_path: Path) -> None:
    order = made(tmp_path)
    assert stream(order, 0) == [f"train-{index}" for index in range(SIZE)]  # no weights yet: the order without
    epochs = [group(index, index, [0.0, 1.0] if index < 3 else [0.0] * 8) for index in range(SIZE)]
    order.learned(4, epochs)
    assert stream(order, 0) == [f"train-{index}" for index in range(SIZE)]  # the epoch has begun
    file = tmp_path / "curriculum" / "epoch-000001.parquet"
    assert not file.exists()
    first = order.at(SIZE)
    kept = recorded(file)
    assert kept is not None
    assert (kept.step, kept.source, kept.ids) == (4, "own", Numbered().ids())
    expected = draws(Numbered().order(1), kept.weights[1], [0, 1, 1])
    assert stream(order, 1) == [f"train-{index}" for index in expected]
    assert (first.position, first.epoch) == (SIZE, 1)
    often = [stream(order, 1).count(f"train-{index}") for index in range(SIZE)]
    assert min(often[:3]) >= 2 > max(often[3:])
    order.learned(5, [group(0, 10, [0.0] * 64)])
    assert stream(order, 1) == [f"train-{index}" for index in expected]


def test_a_record_that_cannot_be_written_issues_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = made(tmp_path)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pq, "write_table", full)
        with pytest.raises(WriteFailed, match="epoch-000000"):
            order.at(0)
    assert not list((tmp_path / "curriculum").glob("epoch-*.parquet"))
    order.learned(3, [group(0, 0, [0.0, 1.0])])
    order.at(0)
    kept = recorded(tmp_path / "curriculum" / "epoch-000000.parquet")
    assert kept is not None
    assert kept.step == 3


@pytest.mark.parametrize("own", [True, False])
def test_a_resumed_run_takes_the_weights_of_what_it_keeps_and_forgets_the_others(tmp_path: Path, own: bool) -> None:
    order = made(tmp_path)
    order.at(0)
    order.learned(1, [group(index, index, [0.0, 1.0]) for index in (1, 2)])
    order.learned(2, [group(3, 3, [0.0] * 8)])
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    order.save(saved, low=5)
    order.at(SIZE)  # recorded after the checkpoint, from rollouts up to it
    order.learned(3, [group(4, 4, [1.0] * 8)])
    order.at(2 * SIZE)  # recorded from rollouts that are taken again
    resumed = made(tmp_path)
    resumed.restore(saved, 5, own=own)
    forget_after(tmp_path, 2)
    there = {file.stem for file in (tmp_path / "curriculum").iterdir()}
    assert there == {"epoch-000000", "epoch-000001"}
    resumed.learned(3, [group(index, index, [0.0] * 8) for index in range(4, 8)])
    assert stream(resumed, 0) == stream(order, 0)
    same = stream(resumed, 1) == stream(order, 1)
    later = recorded(tmp_path / "curriculum" / "epoch-000001.parquet")
    assert later is not None
    assert (same, later.step) == ((True, 2) if own else (False, 3))
    assert stream(resumed, 2) != stream(order, 2)


def test_a_checkpoint_has_the_epochs_that_may_still_be_issued(tmp_path: Path) -> None:
    order = made(tmp_path)
    for epoch in range(4):
        order.at(epoch * SIZE)
    order.save(tmp_path, low=2 * SIZE + 3)
    kept = recorded(tmp_path / curriculum.FILE)
    assert kept is not None
    assert sorted(kept.weights) == [2, 3]


def test_a_checkpoint_of_another_curriculum_or_without_one_says_nothing(tmp_path: Path) -> None:
    order = made(tmp_path, source="first-run")
    order.learned(3, [group(0, 0, [0.0, 1.0]), group(1, 1, [0.0] * 8)])
    order.at(0)
    order.save(tmp_path, low=0)
    resumed = made(tmp_path)
    resumed.restore(tmp_path, 0, own=True)
    assert resumed.step == 0
    assert stream(resumed, 0) == [f"train-{index}" for index in range(SIZE)]
    resumed.restore(tmp_path / "elsewhere", 0, own=False)
    assert resumed.step == 0


def test_estimates_follow_problems_whose_number_has_changed(tmp_path: Path) -> None:
    order = made(tmp_path)
    order.learned(3, [group(4, 0, [0.0, 1.0]), group(9, 1, [0.0] * 8), group(77, 2, [1.0])])
    order.save(tmp_path, low=0)
    kept = recorded(tmp_path / curriculum.FILE)
    assert kept is not None
    found = kept.estimates_of(["train-9", "new", "train-4"])
    assert found.known.count.tolist() == [8, 0, 2]
    assert found.weights() == pytest.approx([4 * 0.25 * 8.25 / 8.5**2, 1, 1])


def test_weights_of_an_epoch_of_other_problems_are_made_again(tmp_path: Path) -> None:
    class Fewer(Numbered):
        def __len__(self) -> int:
            return 4

        def ids(self) -> list[str]:
            return super().ids()[:4]

        def order(self, epoch: int) -> npt.NDArray[np.int64]:
            return np.arange(4)

    order = made(tmp_path)
    order.learned(3, [group(0, 0, [0.0, 1.0]), group(1, 1, [0.0] * 8)])
    order.at(5)
    order.save(tmp_path, low=0)
    resumed = Curriculum(Fewer(), Estimates(4), 0, tmp_path, None, "own")
    resumed.restore(tmp_path, 0, own=True)
    assert {resumed.at(position).id for position in range(4)} <= {*Fewer().ids()}
    kept = recorded(tmp_path / "curriculum" / "epoch-000000.parquet")
    assert kept is not None
    assert kept.weights[0] == pytest.approx([1, 4 * 0.25 * 8.25 / 8.5**2, 1, 1])


def test_groups_of_a_step_count_in_the_order_of_their_positions(tmp_path: Path) -> None:
    first, second = group(0, 3, [0.0, 1.0]), group(0, 8, [1.0] * 4)
    found = []
    for name, groups in (("one", [first, second]), ("other", [second, first])):
        order = made(tmp_path / name)
        order.learned(1, groups)
        order.at(0)
        kept = recorded(tmp_path / name / "curriculum" / "epoch-000000.parquet")
        assert kept is not None
        found.append(kept.weights[0].tolist())
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(4 * 4.75 * 0.75 / 5.5**2)  # 0.5 of 1, then 4 of 4, and 0.25 of 0.5


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def _without(file: Path) -> None:
    table = pq.read_table(file)
    pq.write_table(table.drop_columns("variance"), file)


def _nan(file: Path) -> None:
    table = pq.read_table(file)
    values = pa.array([math.nan] * len(table))
    pq.write_table(table.set_column(table.column_names.index("weight_0"), "weight_0", values), file)


@pytest.mark.parametrize("damage", [_cut, _without, _nan, lambda file: pq.write_table(pa.table({"a": [1]}), file)])
def test_a_damaged_record_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    made(tmp_path).at(0)
    file = tmp_path / "curriculum" / "epoch-000000.parquet"
    damage(file)
    with pytest.raises(WrongInput, match=r"data\.curriculum: .*epoch-000000\.parquet cannot be read"):
        recorded(file)


# From another run's rollouts.

ROWS = [{"question": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(12)]


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer(), EOS_IDS, VOCAB_SIZE)


def problems_of(folder: Path, chat: Chat, rows: Sequence[Mapping[str, Any]] = ROWS, seed: int = 0) -> Problems:
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load(DataConfig(path=str(file), eval=EvalConfig(every=0)), chat, 256, seed)[0]


def recorded_run(folder: Path, problems: Problems, rewards: Mapping[str, Sequence[float]]) -> Path:
    """A run's folder with a group for each of its first problems."""
    for step, position in enumerate(range(len(rewards)), start=1):
        problem = problems.at(position)
        own = rewards.get(problem.id, [0.0, 0.0])
        asked = {"problem_id": [problem.id] * len(own), "problem": [problem.to_json()] * len(own)}
        ledger.write(folder / "rollouts", step, [make_group(position, rewards=own, **asked)])
    return folder


def test_another_runs_rollouts_weight_the_problems_of_any_seed(tmp_path: Path, chat: Chat) -> None:
    first = problems_of(tmp_path, chat)
    seen = {first.at(position).id: [0.0, float(position)] for position in range(3)}
    folder = recorded_run(tmp_path / "run", first, seen)
    problems = problems_of(tmp_path, chat, seed=7)
    found = estimates_from(folder, problems, "vowels")
    by_id = dict(zip(problems.ids(), found.known.count.tolist(), strict=True))
    assert {id: count for id, count in by_id.items() if count} == dict.fromkeys(seen, 2.0)
    assert (found.low, found.high) == (0, 2)
    assert estimates_from(folder, problems, None).weights().tolist() == found.weights().tolist()
    more = problems_of(tmp_path, chat, [*ROWS, {"question": "new", "answer": "1"}])
    assert estimates_from(folder, more, None).known.count.sum() == 6


def test_all_rollouts_of_a_problem_count_alike(tmp_path: Path, chat: Chat) -> None:
    problems = problems_of(tmp_path, chat)
    folder = recorded_run(tmp_path / "run", problems, {problems.at(0).id: [0.0] * 6})
    ledger.write(folder / "rollouts", 2, [ledger.read(ledger.steps(folder / "rollouts")[0])])
    table = ledger.read(ledger.steps(folder / "rollouts")[0])
    place, field = table.column_names.index("reward"), table.schema.field("reward")
    solved = table.set_column(place, field, pa.array([1.0] * 6, field.type))
    ledger.write(folder / "rollouts", 3, [solved])
    found = estimates_from(folder, problems, None)
    assert found.known.count.max() == 18
    assert found.known.mean.max() == pytest.approx(1 / 3)


def test_what_cannot_be_used_is_told_with_a_next_step(tmp_path: Path, chat: Chat) -> None:
    problems = problems_of(tmp_path, chat)
    (tmp_path / "empty").mkdir()
    for folder, told in (("empty", "holds no rollouts/step-[*].parquet"), ("none", "is not there")):
        with pytest.raises(WrongInput, match=rf"data\.curriculum: must be own, or .*{told}; give another"):
            estimates_from(tmp_path / folder, problems, None)
    run = recorded_run(tmp_path / "run", problems, {problems.at(0).id: [0.0, 1.0]})
    with pytest.raises(WrongInput, match=r"counts as accuracy, other, and none .* has it; give another .*eval\.reward"):
        estimates_from(run, problems, "other")
    changed = problems_of(tmp_path, chat, [row | {"answer": "0"} for row in ROWS])
    with pytest.raises(WrongInput, match=r"train-\d+ is another in .*run; .* with the same seed"):
        estimates_from(run, changed, None)
    file = tmp_path / "other.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    few = load(DataConfig(path=str(file), split="train[:1]", eval=EvalConfig(every=0)), chat, 256, 0)[0]
    elsewhere = recorded_run(tmp_path / "elsewhere", problems, {})
    ledger.write(elsewhere / "rollouts", 1, [group(99, 0, [0.0, 1.0])])
    with pytest.raises(WrongInput, match=r"none of those in .* has the id of one"):
        estimates_from(elsewhere, few, None)
    ledger.steps(run / "rollouts")[0].write_bytes(b"PAR1")
    with pytest.raises(WrongInput, match=r"step-000001\.parquet cannot be used"):
        estimates_from(run, problems, None)
