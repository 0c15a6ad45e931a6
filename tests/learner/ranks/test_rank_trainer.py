"""Ranks in real processes, which meet over gloo: the same bits whatever their number, and what ends them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from learner.algo.surrogates import LossConfig
from learner.ranks.rank import check_alike
from tests.learner.rank_processes import (
    Failed,
    doomed_step,
    gradients,
    numbered_step,
    rank_processes,
    steps,
    with_room_for,
)
from tests.learner.rollouts import make_groups, random_logs, said, taught, uniform
from tests.learner.trainers import make_trainer

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT: dict[str, Any] = {"reduce": "exact", "learning_rate": 1e-2, "token_budget": 300}
TAUGHT = {"algorithm": "distill", "loss": LossConfig(beta=1)}
SAID = {"algorithm": "distill", "model": {"teacher": "x"}, "loss": LossConfig(beta=1, teacher_top=3)}
SEVERAL = {"updates_per_batch": 2, "loss": LossConfig(ratio="clip", beta=0.1)}


@pytest.fixture(scope="module")
def ragged() -> list[pa.Table]:
    """Five groups of 80 to 240 tokens: of two updates on them one has fewer micro-batches than four ranks."""
    rng = np.random.default_rng(0)
    return make_groups([rng.normal(size=6).tolist() for _ in range(5)], uniform, max_completion=40)


@pytest.mark.parametrize(
    ("settings", "packed", "counts"),
    [
        pytest.param(SEVERAL, True, (3, 4), marks=pytest.mark.long),
        (SEVERAL, False, (2,)),
        pytest.param({"algorithm": "ppo", "dtype": "bfloat16"}, True, (2,), marks=pytest.mark.long),
        (TAUGHT, True, (2,)),
        (SAID, True, (2,)),
    ],
    ids=["packed", "padded", "PPO", "a teacher with prompts of its own", "a teacher's likeliest tokens"],
)
async def test_the_number_of_ranks_changes_no_bit(
    tiny_path: str,
    adapter_path: str,
    ragged: list[pa.Table],
    settings: dict[str, Any],
    packed: bool,
    counts: tuple[int, ...],
) -> None:
    if settings is TAUGHT:
        ragged = [taught(group, list(range(place, 70))) for place, group in enumerate(ragged)]
    if settings is SAID:
        ragged = [said(group, random_logs, 3) for group in ragged]
    alone = await steps(make_trainer(tiny_path, adapter=adapter_path, **EXACT, **settings), ragged, 2, packed)
    assert len({digest for digest, _ in alone}) == 2  # something was learned in every step
    assert alone[0][1]["loss/trained_tokens"] > 0
    for count in counts:
        with rank_processes(count, tiny_path, adapter=adapter_path, **EXACT, **settings) as ranks:
            assert ranks.all(steps, ragged, 2, packed) == [alone] * count


async def test_fast_sums_are_those_of_one_rank_but_for_rounding(
    tiny_path: str, adapter_path: str, ragged: list[pa.Table]
) -> None:
    settings: dict[str, Any] = {"adapter": adapter_path, "reduce": "fast", "token_budget": 300}
    alone = await gradients(make_trainer(tiny_path, **settings), ragged)
    with rank_processes(2, tiny_path, **settings) as ranks:
        found = ranks.all(gradients, ragged)[1]
    assert 0 < np.linalg.norm(found - alone) < 1e-6 * np.linalg.norm(alone)


async def test_memory_that_one_rank_lacks_halves_the_budget_of_all(
    tiny_path: str, adapter_path: str, ragged: list[pa.Table]
) -> None:
    with rank_processes(2, tiny_path, adapter=adapter_path, **EXACT) as ranks:
        told, sizes, budgets = zip(*ranks.all(with_room_for, 150, ragged), strict=True)
    assert sizes[0][0] > 150 >= max(sizes[0][1:])
    assert budgets[0] == budgets[1] <= 150
    small = make_trainer(tiny_path, adapter=adapter_path, **EXACT | {"token_budget": budgets[0]})
    (alone,) = await steps(small, ragged, 1)
    assert told == (alone, alone)


def test_a_killed_rank_ends_the_others_at_once(tiny_path: str, ragged: list[pa.Table]) -> None:
    with rank_processes(2, tiny_path, **EXACT) as ranks:
        ranks.ask(steps, ragged, 1000)
        assert not ranks.ends[0].poll(1.0)
        ranks.kill(1)
        failed, gone = ranks.answers()
    assert gone is None
    assert isinstance(failed, Failed)
    assert failed.kind == "Unusable"
    assert "another rank is gone (" in failed.text


@pytest.mark.parametrize(
    ("rank", "moment"),
    [pytest.param(1, "begin", marks=pytest.mark.long), (0, "middle"), pytest.param(1, "end", marks=pytest.mark.long)],
)
async def test_a_killed_rank_is_replaced_and_no_bit_changes(
    tiny_path: str, adapter_path: str, ragged: list[pa.Table], rank: int, moment: str
) -> None:
    """Wherever the others are: the step that was under way is taken again by all."""
    settings = EXACT | SEVERAL
    alone = await steps(make_trainer(tiny_path, adapter=adapter_path, **settings), ragged, 3)
    with rank_processes(2, tiny_path, adapter=adapter_path, **settings) as ranks:
        assert ranks.all(numbered_step, ragged, 1) == [alone[0]] * 2
        answers = ranks.all(doomed_step, ragged, 2, rank, moment)
        assert answers[rank] is None
        assert (answers[1 - rank] == alone[1]) == (moment == "end")  # the other has finished, or missed it
        ranks.replace(rank, undo=2)
        assert ranks.all(numbered_step, ragged, 2) == [alone[1]] * 2
        ranks.kill(rank)
        ranks.replace(rank, undo=None)
        assert ranks.all(numbered_step, ragged, 3) == [alone[2]] * 2


def test_ranks_that_compute_differently_are_refused() -> None:
    first = ("2.13.0", "a card", 4, "0a")
    check_alike(1, first, first)
    with pytest.raises(
        ValueError, match=r"same torch's version, rank 0 has 2.13.0 and rank 1 2.14.0; install the same"
    ):
        check_alike(1, first, ("2.14.0", "a card", 4, "0a"))
    with pytest.raises(ValueError, match=r"same weights to train, .* rank 3 1b; model.path and model.adapter must"):
        check_alike(3, first, ("2.13.0", "a card", 4, "1b"))
