"""What an environment is to a rollout. Anyone may write one: any class with these four methods, plain values only.

A trajectory is played by rollout.env.play: the start is rendered once, the policy samples a turn, the environment
answers with messages, which are appended as tokens behind what was sampled, and so on until one side ends it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rollout.schema import Problem

# What tokenizers, pickle and JSON all take, of what a policy or an environment has written.

DEEPEST = 100  # brackets within brackets; ten times as many are beyond what Python can pickle


def is_text(value: object) -> bool:
    """Whether it is a text of which UTF-8 can be made. Half of a surrogate pair is none, and no tokenizer takes it."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_text(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def too_deep(value: Any, most: int = DEEPEST) -> bool:
    """Whether mappings and sequences are nested more than `most` deep in it."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return most == 0 or any(too_deep(one, most - 1) for one in value)


Message = dict[str, Any]
"""A chat message: {"role": "user" | "tool" | ..., "content": "..."}; a tool's answer may also hold its "name"."""

ToolSpec = dict[str, Any]
"""A tool as chat templates are given it: {"type": "function", "function": {"name", "description", "parameters"}}, the
parameters as a JSON schema (transformers.utils.get_json_schema makes one of a function)."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the policy wrote and that could be read."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """How a trajectory begins.

    Attributes:
        messages: what the policy is given; equal in all trajectories of a group.
        tools: what it may call; equal in all trajectories of a group.
        state: a digest of the environment's initial state, which must be equal in a group too; "": not compared.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    state: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy sampled in one turn.

    Attributes:
        text: decoded, without special tokens.
        token_ids: [T of the turn], the end token included if it was sampled.
        calls: the tool calls in it, in their order.
        malformed: one sentence for each attempt at a call that could not be read, fit to be shown to the policy.
    """

    text: str
    token_ids: tuple[int, ...]
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to a turn.

    Attributes:
        messages: what the policy sees next, of the roles tool and user; none are needed when `done`.
        reward: of this turn, added to the trajectory's; None: no reward for this turn.
        done: the trajectory is over.
        metrics: numbers by name, averaged over trajectories as env/<name>.
        warnings: sentences for the log of the run by what they are about; of that only the first is logged.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    warnings: Mapping[str, str] = field(default_factory=dict)


def own_messages(problem: Problem) -> tuple[Message, ...]:
    """The problem's own messages."""
    said = problem.messages
    return ({"role": "user", "content": said},) if isinstance(said, str) else tuple(dict(message) for message in said)


class Environment(Protocol):
    """One trajectory's environment. Every trajectory has an instance of its own, in a process of its own. Plain
    methods do as well as async ones.

    What a method raises ends the trajectory with outcome env_error and no reward: it is trained on nowhere. So that
    crashing is never free for the policy, a tool that fails on what the policy asked for is to be answered as an
    observation.
    """

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Begins; called once. The seed is the same for all trajectories of a group."""
        ...

    async def step(self, turn: Turn) -> Step:
        """Answers a turn of the policy."""
        ...

    async def score(self) -> Mapping[str, float]:
        """Parts of the reward by name, when the trajectory is over, however it ended; {} where turns have it all."""
        ...

    async def close(self) -> None:
        """Frees what the environment holds; called once, also after a fault."""
        ...


# Programs: code that asks the policy for tokens when it likes, such as another library's harness.
#
# An environment is asked by us; a program asks us. What it says of its own tokens is not needed: prompts and answers
# are recorded on this side, token by token.


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
    """The trajectory has had its turns or tokens: the program is to end, and may still give a reward. Programs may
    catch it; of one that does not rollout.env.host makes an end as others are."""


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
    """What serves a trajectory: an Environment, or a program as a chain of questions. The step of
    an environment is given its Turn, that of a program Sampled or NoMore."""

    async def reset(self, problem: Problem, seed: int) -> Start | Asked: ...

    async def step(self, turn: Any) -> Step | Asked: ...

    async def score(self) -> Mapping[str, float]: ...

    async def close(self) -> None: ...
