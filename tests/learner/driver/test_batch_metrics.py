"""The numbers of a batch, by hand."""

import math
import re
from typing import Any

import numpy as np
import pytest

from learner.driver.metrics import batch_metrics, failing, unscored
from rollout.fakes import make_group
from rollout.types import Completion


def completion(tokens: int, finish: str, version: int) -> Completion:
    return Completion(
        np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), finish, np.full(tokens, version, np.int32)
    )


def test_batch_metrics() -> None:
    one = make_group(
        0,
        completions=[completion(1, "stop", 5), completion(4, "length", 4)],
        rewards=[1.0, 3.0],
        reward_parts=[[("format", 1.0), ("answer", 0.0)], [("format", 0.0), ("answer", 3.0)]],
        reward_error=["reward 'answer': 0: stopped after 4 s", None],
        reward_ms=[10.0, 10.0],
    )
    two = make_group(
        1,
        completions=[completion(3, "stop", 3), completion(2, "stop", 6)],
        rewards=[2.0, None],
        reward_parts=[[("format", 1.0), ("answer", 1.0)], [("format", 0.5), ("answer", None)]],
        reward_status=["ok", "timeout"],
        reward_error=[None, "reward 'answer': timeout: no answer within 1 s"],
        reward_ms=[20.0, 20.0],
    )
    found = batch_metrics([one, two], version=6)
    expected = {
        "reward/mean": 2.0,
        "reward/std": (2 / 3) ** 0.5,
        "reward/failed": 0.25,
        "reward/status_timeout": 1.0,
        "reward/zeroed": 1.0,
        "reward/format": 0.625,
        "reward/answer": 4 / 3,
        "reward/ms": 15.0,
        "rollout/completion_length": 2.5,
        "rollout/completion_length_max": 4.0,
        "rollout/truncated": 0.25,
        "rollout/tokens": 10.0,
        "policy/staleness_mean": 1.5,  # 1, 2, 3, 0
        "policy/staleness_max": 3.0,
        "policy/staleness_0": 0.2,  # of the tokens: 2, 1, 4 and 3 of 10
        "policy/staleness_1": 0.1,
        "policy/staleness_2": 0.4,
        "policy/staleness_3": 0.3,
    }
    assert found == pytest.approx(expected)


def test_a_reward_function_that_fails_for_most_stops_the_run_and_for_half_does_not() -> None:
    half = [make_group(rewards=[None, 1.0])]
    assert failing(half) is None
    assert batch_metrics(half, 0)["reward/failed"] == 0.5
    most = failing([make_group(0, rewards=[None, 1.0]), make_group(1, rewards=[None, None])])
    assert re.match(r"3 of 4 completions .*'error': 3.*gleaner rewards try", str(most))
    all_ = failing([make_group(rewards=[None, None], reward_status=["environment"] * 2)])
    assert re.match(r"2 of 2 completions .*'environment': 2.*Mend the environment", str(all_))


def test_having_unscored_is_no_failure() -> None:
    """Of four completions one failed; two have no reward since no function scores them."""
    two = [("math", None), ("code", None)]
    parts = [[("math", 2.0), ("code", None)], [("math", math.nan), ("code", None)], two, two]
    rows: dict[str, Any] = {
        "rewards": [2.0, None, None, None],
        "reward_status": ["ok", "error", "none", "none"],
        "reward_parts": parts,
    }
    found = batch_metrics([make_group(**rows)], 0)
    expected = {"mean": 2.0, "std": 0.0, "failed": 0.25, "status_error": 1.0, "status_none": 2.0, "math": 2.0}
    assert {f"reward/{name}": found.get(f"reward/{name}") for name in expected} == {
        f"reward/{name}": value for name, value in expected.items()
    }
    assert "reward/code" not in found


def test_a_batch_is_unscored_only_if_no_completion_of_any_group_has_a_reward() -> None:
    nobody = make_group(0, rewards=[None, None], reward_status=["none", "none"])
    assert unscored([nobody, make_group(1, rewards=[None, None], reward_status=["error", "none"])])
    assert not unscored([nobody, make_group(1, rewards=[None, 0.0], reward_status=["none", "ok"])])


def test_a_completion_that_went_on_under_a_newer_policy_counts_token_by_token() -> None:
    versions = [[3, 3, 5, 5], [5]]
    completions = [completion(len(own), "stop", own[0]) for own in versions]
    found = batch_metrics([make_group(completions=completions, token_versions=versions)], 5)
    assert {k: v for k, v in found.items() if k[-1].isdigit()} == {
        "policy/staleness_0": 0.6,
        "policy/staleness_1": 0.0,
        "policy/staleness_2": 0.4,
    }
