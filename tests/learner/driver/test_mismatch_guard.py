"""The guard stops at the right step, with a reason that says what to do."""

from __future__ import annotations

import math

from learner.config import GuardConfig
from learner.driver.metrics import MOST_ABOVE, MismatchGuard

NAME = "policy/mismatch_k3"


def test_only_steps_in_a_row_count_and_those_without_tokens_do_not_break_the_row() -> None:
    guard = MismatchGuard(GuardConfig(mismatch_k3=0.01))
    for value in (0.02, 0.03, 0.02, 0.02, 0.01, 0.5, 0.04, 0.02, 0.03):
        assert guard.check({NAME: value}) is None
    assert guard.check({"loss/trained_tokens": 0.0}) is None
    reason = guard.check({NAME: 0.0625})
    assert reason is not None
    assert (
        "policy/mismatch_k3: must be at most guard.mismatch_k3=0.01, was 0.5, 0.04, 0.02, 0.03, 0.0625 in 5 steps"
        in reason
    )
    for word in ("learner.learning_rate", "max_staleness", "model.dtype", "resumed"):
        assert word in reason


def test_what_is_not_a_number_is_too_much_and_null_is_off() -> None:
    for limit, value, stops in ((0.01, math.nan, True), (None, 1e9, False)):
        guard = MismatchGuard(GuardConfig(mismatch_k3=limit))
        reasons = [guard.check({NAME: value}) for _ in range(MOST_ABOVE)]
        assert reasons[:-1] == [None] * (MOST_ABOVE - 1)
        assert (reasons[-1] is not None) == stops
