"""The guard stops at the right step, with a reason that says what to do."""

from __future__ import annotations

import math

from learner.config import GuardConfig
from learner.driver.metrics import MismatchGuard

NAME = "policy/mismatch_k3"


def test_only_steps_in_a_row_count_and_those_without_tokens_do_not_break_the_row() -> None:
    guard = MismatchGuard(GuardConfig(mismatch_k3=0.01, steps=3))
    for value in (0.02, 0.03, 0.01, 0.5, 0.04):
        assert guard.check({NAME: value}) is None
    assert guard.check({"loss/trained_tokens": 0.0}) is None
    reason = guard.check({NAME: 0.0625})
    assert reason is not None
    assert "policy/mismatch_k3: must be at most guard.mismatch_k3=0.01, was 0.5, 0.04, 0.0625 in 3 steps" in reason
    for word in ("learner.learning_rate", "max_staleness", "model.dtype", "resumed"):
        assert word in reason


def test_what_is_not_a_number_is_too_much_and_null_is_off() -> None:
    assert MismatchGuard(GuardConfig(steps=1)).check({NAME: math.nan}) is not None
    assert MismatchGuard(GuardConfig(steps=1, mismatch_k3=None)).check({NAME: 1e9}) is None
