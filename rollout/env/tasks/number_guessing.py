"""A game of several turns: the policy guesses a number, and is told whether it is higher or lower."""

import random
import re
from collections.abc import Mapping

from rewards.base import tagged
from rollout.env.protocol import Start, Step, Turn, own_messages
from rollout.schema import Problem

HIGHER, LOWER = "My number is higher.", "My number is lower."
_NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)


class NumberGuessing:
    """The problem's messages are shown as they are: they must say the range, and that an answer is a number.

    A guess is a turn that is one whole number, or has one in its last <answer> tag. The secret is the problem's column
    `secret` where there is one; else it is drawn from the seed, so that all trajectories of a group guess the same.
    Any turn counts, also one that is no guess, which is told so.
    The reward is 1 - turns / max_turns for a number that was found, else 0.
    """

    def __init__(self, low: int = 1, high: int = 15, max_turns: int = 8) -> None:
        """Raises ValueError where no number lies in low..high, or no turn is allowed."""
        if low > high:
            raise ValueError(f"env.args: low must be <= high, got {low} and {high}")
        if max_turns < 1:
            raise ValueError(f"env.args: max_turns must be >= 1, got {max_turns}")
        self._low, self._high, self._max_turns = low, high, max_turns
        self._turns, self._reward = 0, 0.0

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Thinks of a number. Raises ValueError if the problem's own does not lie in low..high."""
        drawn = random.Random(seed).randint(self._low, self._high)
        self._secret = int(problem.columns.get("secret", drawn))
        if not self._low <= self._secret <= self._high:
            raise ValueError(
                f"column 'secret': must lie in {self._low}..{self._high} (env.args), got {self._secret}; correct the "
                "data or the range"
            )
        return Start(own_messages(problem), state=str(self._secret))

    async def step(self, turn: Turn) -> Step:
        """Compares a guess with the secret."""
        self._turns += 1
        text = tagged(turn.text, "answer")
        guess = _NUMBER.fullmatch((turn.text if text is None else text).strip())
        found = guess is not None and int(guess[0]) == self._secret
        no_guess = {"no_guess": float(guess is None)}
        if found:
            self._reward = 1 - self._turns / self._max_turns
        if found or self._turns == self._max_turns:
            return Step(done=True, metrics=no_guess | {"found": float(found)})
        if guess is None:
            told = f"Answer with one whole number from {self._low} to {self._high}."
        else:
            told = HIGHER if int(guess[0]) < self._secret else LOWER
        return Step(({"role": "user", "content": told},), metrics=no_guess)

    async def score(self) -> Mapping[str, float]:
        """The reward, 0..1."""
        return {"number_guessing": self._reward}

    async def close(self) -> None:
        """Holds nothing."""
