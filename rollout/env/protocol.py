"""The protocols that a user's environment (Environment) or program (Program) implements, and the values it exchanges.

An environment is any class with four methods that take and return plain values. rollout.env.play plays its trajectory:
the start is rendered once, the policy samples a turn, the environment answers with messages, whose tokens are appended
behind the sampled ones, and so on until one side ends the trajectory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rollout.schema import Problem

# Values from a policy or an environment must be such that tokenizers, pickle and JSON all accept them.

DEEPEST = 100  # most levels of nesting; Python cannot pickle ten times as many


def is_text(value: object) -> bool:
    """Whether the value is a text that UTF-8 can encode. No tokenizer accepts half of a surrogate pair."""
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
    """Whether mappings and sequences are nested more than `most` levels deep in the value."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return False
    return most == 0 or any(too_deep(one, most - 1) for one in value)


Message = dict[str, Any]
"""A chat message: {"role": "user" | "tool" | ..., "content": "..."}; an answer of a tool may also hold its "name"."""

ToolSpec = dict[str, Any]
"""A tool as chat templates are given it: {"type": "function", "function": {"name", "description", "parameters"}}, the
parameters as a JSON schema (transformers.utils.get_json_schema makes such a mapping from a function)."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the policy that could be parsed."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """How a trajectory begins.

    Attributes:
        messages: what the policy is given, which must be equal in all trajectories of a group.
        tools: what the policy may call, which must be equal in all trajectories of a group.
        state: a digest of the environment's initial state, which must be equal, too; "": it is not compared.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    state: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy, as it was sampled and read.

    Attributes:
        text: the decoded text, without special tokens.
        token_ids: the turn's tokens, with the end token if it was sampled.
        calls: the tool calls in the turn, in their order.
        malformed: one sentence for each tool call that could not be parsed, fit to be shown to the policy.
    """

    text: str
    token_ids: tuple[int, ...]
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to a turn.

    Attributes:
        messages: what the policy sees next, of roles tool and user; none are needed if `done`.
        reward: the reward of this turn, which is added to the trajectory's; None: this turn has no reward.
        done: whether the trajectory is over.
        metrics: name -> number, averaged over trajectories as env/<name>.
        warnings: subject -> sentence for the log of the run; only the first sentence on a subject is logged.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    warnings: Mapping[str, str] = field(default_factory=dict)


def own_messages(problem: Problem) -> tuple[Message, ...]:
    """The problem's own messages; plain text becomes one message of role user."""
    said = problem.messages
    return ({"role": "user", "content": said},) if isinstance(said, str) else tuple(dict(message) for message in said)


class Environment(Protocol):
    """The environment of one trajectory. Each trajectory has its own instance, in a process of its own. The methods may
    be plain or async.

    An exception in a method ends the trajectory with outcome env_error and no reward, and it is not trained on. A tool
    that fails on a request of the policy should therefore answer with an observation; otherwise the policy could avoid
    a bad reward by making the tool crash.
    """

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Begins the trajectory. Called once; the seed is the same for all trajectories of a group."""
        ...

    async def step(self, turn: Turn) -> Step:
        """Answers a turn of the policy."""
        ...

    async def score(self) -> Mapping[str, float]:
        """Returns the parts of the reward by name; {} if only turns have rewards. Called when the trajectory has ended
        in any way but a fault."""
        ...

    async def close(self) -> None:
        """Frees what the environment holds; called once, also after a fault."""
        ...


# Programs: code that asks the policy for completions when it likes, such as another library's harness.
#
# gleaner calls an environment, but a program calls gleaner, which records prompts and answers token by token.


class Question(NamedTuple):
    """A program's request for a completion. token_ids: the whole prompt. max_tokens: None: as many as are allowed."""

    token_ids: tuple[int, ...]
    max_tokens: int | None


class Sampled(NamedTuple):
    """The policy's answer to a program: T ids and their logprobs; finish_reason is "stop" or "length"."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


class NoMore(NamedTuple):
    """A refusal to continue a program's prompt. reason: the cause as a sentence."""

    reason: str


class Asked(NamedTuple):
    """A program's request for an answer to a conversation, of which it sends all each time (env.use: program).

    messages: of roles system, user, assistant and tool, each with text as content; an assistant's may have tool_calls
    as chat templates take them, arguments as mappings. max_tokens: None: as many as are allowed. stop: the answer ends
    where one of these strings is written. calls: most tool calls to read in the answer; None: all.
    """

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    calls: int | None = None


class Said(NamedTuple):
    """The policy's answer to Asked.

    text: without its thinking, its tool calls and the stop string. calls: with the id of each. finish_reason: "stop" or
    "length". stop: the stop string that ended it, else "". prompt, completion: number of tokens. cut: whether the run's
    own limit of tokens ended it.
    """

    text: str
    thinking: str
    calls: tuple[tuple[str, ToolCall], ...]
    finish_reason: str
    stop: str
    prompt: int
    completion: int
    cut: bool


class Refused(NamedTuple):
    """No answer to Asked, since the model's chat template cannot write it. reason: the cause as a sentence."""

    reason: str


class OutOfBudget(RuntimeError):
    """The trajectory has had its turns or tokens: the program is to end, and may still give a reward. Programs may
    catch it; of one that does not rollout.env.host makes an end as others are."""


class Model(Protocol):
    """The policy as a program sees it. Temperature and stop tokens are those of the run."""

    async def generate(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Sampled:
        """Continues a prompt. The first prompt begins the trajectory. Each later prompt must extend all that was asked
        and sampled before it, also in calls that the program cancelled. Raises OutOfBudget."""
        ...


class Conversing(Model, Protocol):
    """The policy as rollout.env.adapters.program sees it."""

    async def converse(self, asked: Asked) -> Said | NoMore | Refused:
        """Answers a conversation. One that does not go on from an earlier one begins a further row."""
        ...


class Program(Protocol):
    """The program of one trajectory, in a process of its own."""

    async def run(self, problem: Problem, seed: int, model: Model) -> Mapping[str, float]:
        """Plays the whole trajectory with the policy. Returns the parts of the reward by name.

        The first prompt must be the same for all trajectories of a group, which share the seed. An exception ends the
        trajectory with outcome env_error and no reward.
        """
        ...


class Hosted(Protocol):
    """What serves a trajectory: an Environment, or a Program wrapped by rollout.env.host.Driven.

    step is given a Turn for an environment, the answer to its request for a program.
    """

    async def reset(self, problem: Problem, seed: int) -> Start | Question | Asked: ...

    async def step(self, turn: Any) -> Step | Question | Asked: ...

    async def score(self) -> Mapping[str, float]: ...

    async def close(self) -> None: ...
