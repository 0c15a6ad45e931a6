"""The calculator: exact, bounded, and an answer to anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.env.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37*24", "888"),
        (" (3 + 4) * -2 ", "-14"),
        ("0.1 + 0.2", "0.3"),
        ("7/2", "3.5"),
        ("1/3", "0.333333333333"),
        ("2**-3", "0.125"),
        ("2**10 - 6/3", "1022"),
        ("1/0", "error: division by zero"),
        ("4**0.5", "error: an exponent must be a whole number"),
        ("9**9**9", "error: the result is too large"),
        ("2**4000/3", "error: the result is too large"),  # a fraction that no float holds
        ("1" * 201, "error: an expression may have 200 characters, this one has 201"),
    ],
)
def test_what_it_answers(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize("expression", ["", "2 +", "7//2", "3 4", "(1, 2)", "1e3", "__import__('os')", "5 % 3", "..."])
def test_what_is_no_arithmetic_is_told_how_to_write_it(expression: str) -> None:
    assert calculator(expression).startswith("error: write numbers with + - * / ** and parentheses")


@given(st.text("0123456789.+-*/() ", max_size=60))
def test_it_answers_anything_at_once(expression: str) -> None:
    assert calculator(expression)  # in time: a tower of powers, computed, would take hours


@given(st.lists(st.integers(-(10**6), 10**6), min_size=2, max_size=6), st.data())
def test_it_agrees_with_whole_numbers_of_python(numbers: list[int], data: st.DataObject) -> None:
    signs = data.draw(st.lists(st.sampled_from("+-*"), min_size=len(numbers), max_size=len(numbers)))
    expression = "".join(f"({number}){sign}" for number, sign in zip(numbers, signs, strict=True))[:-1]
    assert calculator(expression) == str(eval(expression))
