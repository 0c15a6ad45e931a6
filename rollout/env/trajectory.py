"""One trajectory as it grows: what the policy sampled and what it was answered, token by token."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollout.env.protocol import Message, Start, Step, Turn
from rollout.types import Completion

FAULTS = ("env_error", "env_timeout", "env_killed", "flood", "bad_observation", "branched")
"""Outcomes that are the environment's fault: the trajectory has no reward and is trained on nowhere. `branched`: a
program's prompt does not extend what was asked and sampled before, so that no one row holds all of it."""
FAULT = "environment"  # reward_status of a trajectory that ended so
CUT = ("turns", "length", "unclosed")
"""Outcomes that the environment did not choose: at env.max_turns, at rollout.max_completion_length, or with a turn that
the chat template cannot go on from. Others are `done`, by the environment's word, and FAULTS."""

TURNS = "env"  # the part of the reward that is the sum of the turns' rewards


class EnvironmentFault(Exception):
    """An environment that raised, hung, died, flooded or returned no answer.

    Args:
        outcome: one of FAULTS.
        sentence: what happened, for people.
    """

    def __init__(self, outcome: str, sentence: str) -> None:
        super().__init__(sentence)
        self.outcome, self.sentence = outcome, sentence


@dataclass(slots=True)
class Played:
    """One turn of the policy: tokens [start, stop) of what follows the prompt of its row."""

    start: int
    stop: int
    generate_ms: float
    env_ms: float = 0.0
    reward: float | None = None
    calls: int = 0
    malformed: int = 0

    def as_row(self) -> dict[str, float | int | None]:
        """The struct of rollout.schema."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Row:
    """A prompt and what follows it, in one piece. Letters: T tokens so far.

    Attributes:
        ids, logprobs, versions, mask: [T]; of an observation the logprob is 0, the version that of the turn before, the
            mask false.
    """

    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turns: list[Played] = field(default_factory=list)

    @property
    def so_far(self) -> tuple[int, ...]:
        """All of it."""
        return (*self.prompt_ids, *self.ids)

    def sampled(self, completion: Completion, generate_ms: float) -> None:
        """The policy's next turn."""
        start = len(self.ids)
        self.ids += completion.token_ids.tolist()
        self.logprobs += completion.logprobs.tolist()
        self.versions += completion.versions.tolist()
        self.mask += [True] * len(completion.token_ids)
        self.turns.append(Played(start, len(self.ids), generate_ms))

    def read(self, ids: Sequence[int], version: int) -> None:
        """Tokens that the policy did not sample."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.versions += [version] * len(ids)
        self.mask += [False] * len(ids)


@dataclass(slots=True)
class Trajectory:
    """What one environment and the policy make of a problem.

    Attributes:
        rows: one; with env.history "template" another one where the chat template has rewritten what came before.
        state: see rollout.env.protocol.Start. began: whether the environment was reset; before that the prompt is the
            problem's own. opening: the messages that it began with.
        messages: the conversation after the prompt, as reward functions are given it. written: the same as the chat
            template is given it, where it is rendered anew.
        parts: rewards by name, from score(); the sum of the turns' rewards as "env".
        outcome: `done`, or one of CUT or FAULTS, once it is over; `fault` says in a sentence what went wrong with the
            environment.
    """

    rows: list[Row]
    state: str = ""
    began: bool = False
    opening: tuple[Message, ...] = ()
    messages: list[Message] = field(default_factory=list)
    written: list[Message] = field(default_factory=list)
    metrics: Counter[str] = field(default_factory=Counter)
    parts: dict[str, float] = field(default_factory=dict)
    outcome: str = ""
    fault: str = ""

    @property
    def row(self) -> Row:
        """The one that is being written."""
        return self.rows[-1]

    @property
    def turns(self) -> list[Played]:
        """Of all rows."""
        return [turn for row in self.rows for turn in row.turns]

    @property
    def faulted(self) -> bool:
        """Whether it ended by a fault of its environment."""
        return self.outcome in FAULTS

    def begin(self, start: Start, prompt_ids: tuple[int, ...]) -> None:
        """Once the environment was reset."""
        self.began, self.state, self.rows = True, start.state, [Row(prompt_ids)]
        self.opening = start.messages

    def spoke(self, turn: Turn) -> None:
        """What the newest turn says, once it has been read."""
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in turn.calls]
        self.messages.append({"role": "assistant", "content": turn.text} | ({"tool_calls": calls} if calls else {}))
        self.row.turns[-1].calls, self.row.turns[-1].malformed = len(turn.calls), len(turn.malformed)

    def answered(self, step: Step, env_ms: float) -> None:
        """The environment's answer to it, before it is known whether there is room for it."""
        self.row.turns[-1].env_ms, self.row.turns[-1].reward = env_ms, step.reward
        self.metrics.update(step.metrics)

    def observed(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        """The answer as the policy sees it, behind what was sampled."""
        self.messages += messages
        self.row.read(ids, self.row.versions[-1])

    def rewritten(self, messages: Sequence[Message], prompt: Sequence[int]) -> None:
        """The answer in a conversation that was rendered anew and does not begin with what was sampled: another row,
        whose prompt is as much of the first row's as it still begins with, and one token where that is nothing."""
        self.messages += messages
        first, version = self.rows[0].prompt_ids, self.row.versions[-1]
        same = next((i for i, (a, b) in enumerate(zip(first, prompt, strict=False)) if a != b), len(first))
        size = max(same, 1)
        self.rows.append(Row(tuple(prompt[:size])))
        self.row.read(prompt[size:], version)

    def scored(self, parts: Mapping[str, float]) -> None:
        """The final parts of the reward; turn rewards are one, if there is any."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        self.parts = ({TURNS: float(sum(rewards))} if rewards else {}) | dict(parts)
