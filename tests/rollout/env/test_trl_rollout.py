"""TRL's rollout functions: what they return must be what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollout.env.adapters.trl import TrlRolloutFunc
from rollout.env.host import BadAnswer
from rollout.env.protocol import OutOfBudget, Sampled
from rollout.schema import Problem
from tests.rollout.env.test_rollouts import CHAT, MODEL, PROBLEM

FUNCTIONS = Path(__file__).with_name("rollout_funcs.py")
TURN = [11, 12, 13]


class Policy:
    """Says TURN as often as it may."""

    def __init__(self, turns: int = 9) -> None:
        self.asked: list[tuple[list[int], int | None]] = []
        self._turns = turns

    async def generate(self, token_ids: Any, max_tokens: int | None = None) -> Sampled:
        if len(self.asked) == self._turns:
            raise OutOfBudget("over")
        self.asked.append((list(token_ids), max_tokens))
        return Sampled(list(TURN), [-0.5] * 3, "stop")


async def run(function: str, policy: Policy | None = None, problem: Problem = PROBLEM) -> dict[str, float]:
    program = TrlRolloutFunc(
        f"{FUNCTIONS}:{function}", MODEL, settings={"bonus": 0.5, "max_completion_length": 7},
        rewards=[f"{FUNCTIONS}:reward_from_env"],
    )  # fmt: skip
    return dict(await program.run(problem, 5, policy or Policy()))


async def test_it_is_given_what_trls_trainer_offers_and_its_fields_go_to_the_rewards() -> None:
    policy = Policy()
    assert await run("two_turns", policy) == {"reward_from_env": 3 * 0.5 + 2}
    prompt = CHAT.tokenizer.encode("1 + 2", add_special_tokens=False)
    assert policy.asked == [(prompt, 7), ([*prompt, *TURN, 8, 9], 7)]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("without_mask", "env_mask must be returned where others wrote between the turns, here 2 tokens"),
        ("observed_counts", "env_mask must be what was asked and sampled, 10 values, got 1 at 3, not 0"),
        ("encoded_again", "completion_ids must be what was asked and sampled, 8 values, got 12 at 0, not 11"),
        ("several", "completion_ids must hold one completion, for its one prompt, got 2"),
        ("lacking", "must return a dict with .*, and what it returned lacks completion_ids, logprobs"),
    ],
)
async def test_what_differs_from_the_record_is_a_fault_by_name(function: str, sentence: str) -> None:
    with pytest.raises(BadAnswer, match=sentence):
        await run(function)


async def test_the_rest_of_the_trainer_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match=r"trainer\.accelerator is not here, .* there are args, bonus, max_compl"):
        await run("accelerated")


async def test_a_trajectory_whose_turns_are_over_has_the_reward_that_is_said() -> None:
    assert await run("endless", Policy(turns=3)) == {"reward_from_env": 0.0}
