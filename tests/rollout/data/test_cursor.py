"""The place in the stream of problems: whatever is lost, dropped, saved and restored, each position is consumed exactly
once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.producer import Cursor

MOVES = st.lists(st.tuples(st.sampled_from(["issue", "issue", "again", "finish"]), st.integers(0, 9)), max_size=12)


class Run:
    """One process: issues, loses and consumes; knows what it has consumed."""

    def __init__(self, state: str, consumed: list[int]) -> None:
        self.cursor, self.consumed = Cursor(), list(consumed)
        self.cursor.restore(**json.loads(state))
        self.flying: list[tuple[int, int]] = []
        self.issued: set[tuple[int, int]] = set()

    def move(self, what: str, number: int) -> None:
        if what == "issue":
            place = self.cursor.issue()
            assert place not in self.issued  # a group_id is unique
            self.issued.add(place)
            self.flying.append(place)
        elif self.flying:
            position, attempt = self.flying.pop(number % len(self.flying))
            if what == "again":
                self.cursor.again(position, attempt)
            else:
                self.cursor.finish(position)
                self.consumed.append(position)


@given(lives=st.lists(st.tuples(MOVES, MOVES), min_size=1, max_size=4))
def test_each_position_is_consumed_once_on_the_surviving_line(
    lives: list[tuple[list[tuple[str, int]], list[tuple[str, int]]]],
) -> None:
    state, consumed = json.dumps(Cursor().state()), list[int]()
    for kept, undone in lives:
        run = Run(state, consumed)
        for move in kept:
            run.move(*move)
        state, consumed = json.dumps(run.cursor.state()), list(run.consumed)
        for move in undone:  # after the checkpoint, before the kill
            run.move(*move)
    run = Run(state, consumed)
    for _ in range(40):  # and then all goes well
        run.move("issue", 0)
        run.move("finish", 0)
    assert len(run.consumed) == len(set(run.consumed))
    assert {*range(run.cursor.low)} == set(run.consumed)  # 40 are more than were ever skipped: no hole is left


def test_what_was_lost_comes_before_what_is_new_lowest_first() -> None:
    cursor = Cursor()
    assert [cursor.issue() for _ in range(4)] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    cursor.again(3, 0)
    cursor.again(1, 0)
    assert [cursor.issue() for _ in range(3)] == [(1, 1), (3, 1), (4, 0)]


def test_after_a_restore_only_what_was_done_is_skipped() -> None:
    cursor = Cursor()
    cursor.restore(2, [3, 6, 7])
    assert [cursor.issue()[0] for _ in range(5)] == [2, 4, 5, 8, 9]


def test_a_position_cannot_be_consumed_twice() -> None:
    cursor = Cursor()
    cursor.restore(5, [7])
    for position in (4, 7):
        with pytest.raises(ValueError, match=f"position {position} was consumed twice"):
            cursor.finish(position)
    assert cursor.state() == {"low": 5, "done": [7]}
