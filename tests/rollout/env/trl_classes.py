"""Classes as TRL's users write them. Loaded by their file."""

import random
import time
from collections.abc import Iterator
from typing import Any


class Counter:
    """Counts up to a number of the row's."""

    def reset(self, **kwargs: object) -> str | None:
        self.value, self.goal = 0, kwargs["goal"]
        self.luck = random.random()
        return f" Start at {self.value}." if kwargs["tell"] else None

    def add(self, by: int) -> dict[str, int]:
        """
        Adds to the counter.

        Args:
            by: How much.

        Returns:
            The counter.
        """
        if by < 0:
            raise ValueError("Only up.")
        if by == 99:
            time.sleep(1)
        self.value += by
        return {"value": self.value}

    async def look(self) -> int:
        """
        Shows the counter.
        """
        return self.value

    def get_reward(self) -> float | None:
        return float(self.value == self.goal) if self.goal else None

    def _hidden(self) -> None: ...


class Judged:
    """Has its reward from a function."""

    def reset(self, **kwargs: object) -> None:
        self.score = 3.0

    async def get_reward(self) -> float:
        return 0.5


class Yields(Judged):
    def lines(self) -> Iterator[str]:
        """Lines."""
        yield ""


class NoReset:
    def tool(self) -> None:
        """Nothing."""


def reward_score(environments: list[Judged], completions: list[list[object]], **kwargs: object) -> list[float]:
    return [env.score + len(messages) for env, messages in zip(environments, completions, strict=True)]


def seen(
    environments: list[Any], prompts: list[list[object]], completions: list[list[object]], **kwargs: object
) -> list[float]:
    environments[0].seen = prompts[0], list(completions[0])
    return [0.0]


def greedy(completions: list[list[object]], trainer_state: object) -> list[float]:
    return [0.0 for _ in completions]


class Own:
    """Begins by itself."""

    def reset(self) -> str:
        self.number = random.randrange(10**6)
        return f"Say {self.number}."


class Told:
    """Says what it is given."""

    def reset(self, **columns: object) -> str:
        return ", ".join(sorted(columns))


class Numbered:
    """Wants the number of its episode."""

    def reset(self, episode: int, **others: Any) -> str:
        assert [*others] == ["prompt"]
        return f"Level {episode}."
