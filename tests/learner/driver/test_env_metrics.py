"""Numbers of trajectories, by hand."""

from typing import Any

import numpy as np
import pytest

from learner.driver.metrics import batch_metrics, env_metrics
from rollout.env.host import BadAnswer, parts, step_to_json
from rollout.env.protocol import Step
from rollout.fakes import make_group
from rollout.types import Completion


def turn(start: int, stop: int, **changed: Any) -> dict[str, Any]:
    made = {"start": start, "stop": stop, "reward": None, "generate_ms": 1.0, "env_ms": 250.0, "calls": 1}
    return made | {"malformed": 0} | changed


def completion(length: int, outcome: str) -> Completion:
    zeros = np.zeros(length, np.int32)
    return Completion(zeros, zeros.astype(np.float32), outcome, zeros)


def test_means_over_trajectories() -> None:
    outcomes = ["done", "env_killed", "done", "length"]
    group = make_group(
        completions=[completion(5, outcome) for outcome in outcomes],
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
        completions=[completion(3, "done"), completion(4, "done"), completion(2, "turns")],
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
