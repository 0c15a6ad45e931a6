"""The numbers of a batch, by hand. Numbers of trajectories, by hand. The guard stops at the right step, with a
reason that says what to do. What is said of steps from which little or nothing can be learned, by hand.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from learner.config import GuardConfig, RunConfig
from learner.driver.metrics import MOST_ABOVE, MismatchGuard, SignalWatch, batch_metrics, env_metrics, failing, unscored
from rollout.env.host import BadAnswer, parts, step_to_json
from rollout.env.protocol import Step
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


# Numbers of trajectories, by hand.


def turn(start: int, stop: int, **changed: Any) -> dict[str, Any]:
    made = {"start": start, "stop": stop, "reward": None, "generate_ms": 1.0, "env_ms": 250.0, "calls": 1}
    return made | {"malformed": 0} | changed


def env_metrics_completion(length: int, outcome: str) -> Completion:
    zeros = np.zeros(length, np.int32)
    return Completion(zeros, zeros.astype(np.float32), outcome, zeros)


def test_means_over_trajectories() -> None:
    outcomes = ["done", "env_killed", "done", "length"]
    group = make_group(
        completions=[env_metrics_completion(5, outcome) for outcome in outcomes],
        rewards=[1.0, None, 0.0, 0.5],
        reward_status=["ok", "environment", "ok", "ok"],
        loss_mask=[[True, False, False, True, True], [True] * 5, [True] * 5, [True, False, True, True, True]],
        turns=[[turn(0, 1), turn(3, 5)], [turn(0, 5, malformed=2)], [turn(0, 5)], [turn(0, 1), turn(2, 5, calls=3)]],
        messages=["[]"] * 4,
        env_metrics=[[("solved", 1.0)], [], [("solved", 0.0)], [("solved", 1.0)]],
    )
    found = env_metrics(group)
    assert found == {
        "env/turns": 1.5,
        "env/turns_max": 2.0,
        "env/calls": 2.0,
        "env/malformed": 0.5,
        "env/seconds": 0.375,
        "env/observation_tokens": 0.75,
        "env/errors": 0.25,
        "env/outcome_done": 0.5,
        "env/outcome_env_killed": 0.25,
        "env/outcome_length": 0.25,
        "env/solved": 0.5,
    }
    whole = batch_metrics([group], version=0)
    assert whole["env/turns"] == 1.5
    tokens = {"tokens": 17.0, "completion_length": 4.25, "completion_length_max": 5.0}  # 3, 5, 5 and 4 were sampled
    assert {f"rollout/{name}": whole[f"rollout/{name}"] for name in tokens} == {
        f"rollout/{name}": count for name, count in tokens.items()
    }
    assert (whole["reward/failed"], whole["reward/status_environment"]) == (0.25, 1.0)
    assert whole["reward/mean"] == pytest.approx(0.5)
    for name in found.keys() - {"env/solved"}:
        with pytest.raises(BadAnswer, match="step: a metric is named .* already"):
            step_to_json(Step(done=True, metrics={name.removeprefix("env/"): 1.0}))
    for name in [name for name in found if "solved" not in name and "outcome" not in name]:  # as eval/ it is a reward's
        with pytest.raises(BadAnswer, match="score: a reward is named .* already"):
            parts({name.removeprefix("env/"): 1.0})
    assert step_to_json(Step(done=True, metrics={"mean": 1.0}))["metrics"] == {"mean": 1.0}  # a reward's name alone


def test_a_trajectory_of_two_rows_counts_once() -> None:
    """Its age is that of its oldest token, and its length all that was sampled in both rows."""
    group = make_group(
        completions=[
            env_metrics_completion(3, "done"),
            env_metrics_completion(4, "done"),
            env_metrics_completion(2, "turns"),
        ],
        sample=[0, 0, 1],
        rewards=[1.0, 1.0, 0.0],
        reward_parts=[[("won", 1.0)], [("won", 1.0)], [("won", 0.0)]],
        loss_mask=[[True] * 3, [False] * 3 + [True], [True] * 2],
        turns=[[turn(0, 3)], [turn(3, 4, calls=2)], [turn(0, 2)]],
        messages=[None, "[]", "[]"],
        env_metrics=[[], [("solved", 1.0)], [("solved", 0.0)]],
        reward_ms=[8.0, 8.0, 2.0],
        token_versions=[[1, 1, 2], [0, 0, 0, 2], [2, 2]],
        policy_version_min=[1, 2, 2],
    )
    found = batch_metrics([group], version=3)
    wanted = {"env/turns": 1.5, "env/turns_max": 2.0, "env/calls": 2.0, "env/seconds": 0.375, "env/solved": 0.5}
    wanted |= {"env/observation_tokens": 1.5, "env/outcome_done": 0.5, "env/outcome_turns": 0.5}
    wanted |= {"reward/mean": 0.5, "reward/won": 0.5, "reward/ms": 5.0}
    wanted |= {"rollout/tokens": 6.0, "rollout/completion_length": 3.0, "rollout/completion_length_max": 4.0}
    wanted |= {"policy/staleness_mean": 1.5, "policy/staleness_max": 2.0}
    wanted |= {"policy/staleness_0": 0.0, "policy/staleness_1": 4 / 6, "policy/staleness_2": 2 / 6}
    assert {name: found[name] for name in wanted} == pytest.approx(wanted)
    assert not any(name.startswith("policy/staleness_3") for name in found)  # of observations alone


def test_single_completions_have_none() -> None:
    assert env_metrics(make_group()) == {}


# The guard stops at the right step, with a reason that says what to do.

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


# What is said of steps from which little or nothing can be learned, by hand.

GROUPS = 4
QUIET = {"reward/mean": 0.25, "reward/std": 0.5, "rollout/truncated": 0.1, "loss/trained_tokens": 90.0}


def watched(*steps: dict[str, float], **loss: Any) -> tuple[SignalWatch, list[str]]:
    given = {
        "model": {"path": "x"}, "data": {"path": "x"}, "rewards": ["number"], "rollout": {"max_completion_length": 96},
        "learner": {"groups_per_step": GROUPS, "loss": loss},
    }  # fmt: skip
    watch = SignalWatch(RunConfig.model_validate(given))
    return watch, [sentence for step in steps for sentence in watch.add(QUIET | step)]


def alike(*groups: float) -> list[dict[str, float]]:
    return [{"reward/zero_variance_groups": one} for one in groups]


def test_it_is_said_once_while_the_run_goes_on_and_again_at_its_end() -> None:
    watch, said = watched(*alike(*[4] * 12, 3))
    assert len(said) == 1
    assert said[0].startswith(
        "in 40 of the 40 groups of the last 10 steps all completions have the same reward (mean 0.25)"
    )
    (last,) = watch.advice()
    assert last.startswith("in 39 of the 40 groups of the last 10 steps")


@pytest.mark.parametrize(
    ("groups", "accuracies", "learned"),
    [
        (3, [0.3, 0.9, 0.91, 0.9], True),
        (3, [0.9, 0.91, 0.9], False),  # as good at first
        (3, [0.3, 0.8, 0.85, 0.9], False),  # it rises
        (3, [0.3, 0.9], False),
        (2, [0.3, 0.9, 0.91, 0.9], False),
        (4, [0.3, 0.9, 0.91, 0.9], True),
        (4, [0.3, 0.3, 0.3, 0.3], False),
        (4, [0.1, 0.3, 0.3, 0.3], False),  # stuck, and no better than that
    ],
)
def test_a_task_that_is_learned_is_told_with_what_to_do(groups: float, accuracies: list[float], learned: bool) -> None:
    watch, _ = watched()
    for accuracy in accuracies:
        watch.evaluated({"eval/accuracy": accuracy})
    said = [one for step in alike(*[groups] * 12) for one in watch.add(QUIET | step)]
    assert len(said) == (learned or groups == 4)
    assert [one.startswith("the task seems learned: in ") for one in said] == [learned] * len(said)
    if learned:
        assert (
            "eval/accuracy has stayed at 0.900 for three evaluations, from 0.300 at first; further steps want"
            in said[0]
        )


def test_a_few_steps_are_enough_at_the_end() -> None:
    watch, said = watched(*alike(4, 4, 4))
    assert said == []
    assert len(watch.advice()) == 1
    assert watched(*alike(4, 4))[0].advice() == []
    same = {"reward/zero_variance_groups": 4.0, "reward/std": 0.0, "reward/mean": 0.0}
    assert watched(same)[0].advice()[0].startswith("in 4 of the 4 groups of the last step all completions have")


@pytest.mark.parametrize("groups", [[4] * 8 + [0, 0], [3] * 20, [0] * 20])
def test_groups_that_differ_are_not_spoken_of(groups: list[float]) -> None:
    watch, said = watched(*alike(*groups))
    assert said == []
    assert watch.advice() == []


def test_ppo_learns_from_one_completion_alone_and_from_nothing_where_all_score_the_same() -> None:
    watch, said = watched(*[{"reward/mean": 0.0}] * 20)
    assert (said, watch.advice()) == ([], [])
    watch, said = watched(*[{"reward/mean": 0.2, "reward/std": 0.0}] * 20)
    assert len(said) == 1
    assert said[0].startswith("in the last 10 steps all completions have the same reward (0.2), so that no answer")


@pytest.mark.parametrize("share", [0.93, 1.0])
def test_completions_that_are_nearly_all_cut_off_are_told_early_and_once(share: float) -> None:
    cut = {"rollout/truncated": share, "reward/zero_variance_groups": 0.0}
    watch, said = watched(*[cut] * 12)
    told = f"in the last 3 steps {share:.0%} of the completions reached rollout.max_completion_length=96 before they"
    assert len(said) == 1
    assert said[0].startswith(told)
    assert "rollout.stop" in said[0]
    assert "mask_truncated" not in said[0]
    assert watch.advice()[0].startswith("in the last 10 steps ")
    assert watched(cut)[0].advice()[0].startswith("in the last step ")
    assert watched(*[cut | {"rollout/truncated": 0.85}] * 20)[1] == []


def test_the_mask_that_leaves_nothing_to_train_on_is_named() -> None:
    nothing = {"loss/trained_tokens": 0.0, "reward/zero_variance_groups": 1.0}
    whole = {"rollout/truncated": 1.0} | nothing
    (told,) = watched(*[whole] * 4, mask_truncated=True)[1]
    assert told.endswith("learner.loss.mask_truncated leaves them out: no token was trained on")
    half = {"rollout/truncated": 0.5} | nothing
    (told,) = watched(*[half] * 4, mask_truncated=True)[1]
    assert told.startswith("in the last 3 steps no token was trained on")
    assert "50% of the completions" in told
    assert watched(*[half] * 4)[1] == []
