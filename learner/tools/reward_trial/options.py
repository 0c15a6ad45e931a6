"""gleaner rewards try: which of its two forms is meant, on saved rollouts or on data, and what goes with it."""

import sys
from typing import Any

from pydantic import ValidationError

from learner.config.load import sentences
from learner.tools.rescore import RescoreError, argument, rescore, size_of
from learner.tools.reward_trial.cases import TrialError
from learner.tools.reward_trial.command import Asked
from learner.tools.reward_trial.command import run as run_on_data
from rewards.config import RewardConfig
from rewards.memory import DEFAULT

OF_ROLLOUTS = ("steps",)
OF_DATA = (
    "config", "data", "split", "prompt", "samples", "reference", "completion", "completions", "generate", "json",
)  # fmt: skip
OF_ONE = ("timeout", "arg", "env")  # a reward function that is named before the options
SECONDS, STEPS = 10.0, 5


def run(given: dict[str, Any]) -> int:
    """Exit code: 0; 1 if a reward function failed on data; 2 if something given is wrong, which is printed.

    given: of learner.tools.commands.rewards.try_reward, by name; what was not given is None or empty.
    """
    try:
        _check(given)
        if given["rollouts"] is not None:
            timeout_s = SECONDS if given["timeout"] is None else given["timeout"]
            memory = DEFAULT if given["memory"] is None else given["memory"]
            wanted = (timeout_s, given["arg"] or (), given["env"] or (), memory)
            print(rescore(given["reward"], given["rollouts"], given["steps"] or STEPS, *wanted))
            return 0
        return run_on_data(_asked(given))
    except (TrialError, RescoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check(given: dict[str, Any]) -> None:
    """Raises TrialError for options that do not go together."""
    used = [name for name, value in given.items() if not (value is None or value is False or value == [])]
    if "rollouts" in used and (wrong := [name for name in OF_DATA if name in used]):
        raise TrialError(f"{_named(wrong)}: does not go with --rollouts, whose completions are scored; leave it out")
    if not {"rollouts", "config", "data"} & set(used):
        raise TrialError(
            "--config, --data or --rollouts: one is required: the configuration of a run to come, a file of rows, or "
            "the rollouts of a run"
        )
    if "rollouts" not in used and (wrong := [name for name in OF_ROLLOUTS if name in used]):
        raise TrialError(f"{_named(wrong)}: goes with --rollouts alone; leave it out")
    if "reward" not in used and "config" not in used:
        raise TrialError("REWARD: required without --config; name a reward function before the options")
    if "reward" not in used and (wrong := [name for name in OF_ONE if name in used]):
        raise TrialError(f"{_named(wrong)}: is of one function, and --config has its own; name one before the options")


def _named(names: list[str]) -> str:
    return ", ".join(f"--{name}" for name in names)


def _asked(given: dict[str, Any]) -> Asked:
    """Raises TrialError, RescoreError."""
    return Asked(
        reward=_reward(given), config=given["config"], data=given["data"], split=given["split"],
        prompt=given["prompt"], samples=given["samples"], reference=given["reference"],
        completion=given["completion"] or (), completions=given["completions"], generate=given["generate"] or 0,
        memory=None if given["memory"] is None else size_of(given["memory"]), as_json=given["json"],
    )  # fmt: skip


def _reward(given: dict[str, Any]) -> RewardConfig | None:
    if given["reward"] is None:
        return None
    said = {"timeout_s": given["timeout"], "env": given["env"], "args": dict(map(argument, given["arg"] or ())) or None}
    try:
        return RewardConfig(use=given["reward"], **{key: value for key, value in said.items() if value is not None})
    except ValidationError as error:
        raise TrialError("; ".join(sentences(error, RewardConfig))) from None
