"""Programs: code that asks the policy for tokens when it likes, such as another library's harness.

An environment is asked by us; a program asks us. What it says of its own tokens is not needed: prompts and answers are
recorded on this side, token by token.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rollout.env.protocol import Start, Step
from rollout.schema import Problem


class Asked(NamedTuple):
    """What a program wants continued: the whole prompt, and the most tokens that it wants; None: as many as may be."""

    token_ids: tuple[int, ...]
    max_tokens: int | None


class Sampled(NamedTuple):
    """The policy's answer: ids and their logprobs [T]; finish_reason "stop" or "length"."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class NoMore(NamedTuple):
    """Why the policy does not answer, as a sentence."""

    reason: str


class OutOfBudget(RuntimeError):
    """The trajectory has had its turns or tokens: the program is to end, and may still give a reward."""


class Model(Protocol):
    """The policy as a program has it. Temperature and what ends a turn are the run's."""

    async def generate(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Sampled:
        """Continues a prompt. The first one begins the trajectory, and every later one must extend all that was asked
        and sampled before it, by calls that the program gave up too. Raises OutOfBudget."""
        ...


class Program(Protocol):
    """One trajectory's program, in a process of its own."""

    async def run(self, problem: Problem, seed: int, model: Model) -> Mapping[str, float]:
        """Drives the policy to the end of the trajectory -> the parts of the reward by name. The first prompt must be
        the same for all trajectories of a group, which share the seed. What it raises ends the trajectory as env_error,
        without a reward."""
        ...


class Hosted(Protocol):
    """What serves a trajectory: a rollout.env.protocol.Environment, or a program as a chain of questions. The step of
    an environment is given its Turn, that of a program Sampled or NoMore."""

    async def reset(self, problem: Problem, seed: int) -> Start | Asked: ...

    async def step(self, turn: Any) -> Step | Asked: ...

    async def score(self) -> Mapping[str, float]: ...

    async def close(self) -> None: ...
