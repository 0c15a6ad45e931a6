"""The record of a trajectory, which grows with each turn of the policy, and the outcomes that it may end with."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.env.protocol import Message, Start, Step, ToolSpec, Turn
from rollout.types import Completion

FAULTS = ("env_error", "env_timeout", "env_killed", "flood", "bad_observation", "branched")
"""Outcomes that are the environment's fault: the trajectory gets no reward and is not trained on. `branched` means that
a program's prompt does not extend what was asked and sampled before, so that a single row cannot hold both."""
FAULT = "environment"  # reward_status of a trajectory whose outcome is one of FAULTS
CUT = ("turns", "length", "unclosed")
"""Outcomes of trajectories that were cut off: at env.max_turns, at rollout.max_completion_length, or behind a turn that
the chat template cannot continue. A trajectory that the environment ended has the outcome `done`."""

TURNS = "env"  # the part of the reward that is the sum of the turns' rewards


class EnvironmentFault(Exception):
    """An environment that raised, hung, died, flooded or returned no answer. The trajectory ends with its outcome
    (Player), and learner.driver.input_checks refuses the environment.

    Args:
        outcome: one of FAULTS.
        sentence: what happened, as a sentence for the log.
    """

    def __init__(self, outcome: str, sentence: str) -> None:
        super().__init__(sentence)
        self.outcome, self.sentence = outcome, sentence


@dataclass(slots=True)
class Played:
    """One turn of the policy. start, stop: its tokens are [start, stop) of those behind the prompt of its row."""

    start: int
    stop: int
    generate_ms: float
    env_ms: float = 0.0
    reward: float | None = None
    calls: int = 0
    malformed: int = 0

    def as_row(self) -> dict[str, float | int | None]:
        """The turn as rollout.schema.TURN."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Row:
    """A prompt and the T tokens that follow it so far: one row of rollout.schema.

    Attributes:
        ids, logprobs, versions, mask: [T]. A token of an observation has logprob 0, the policy version of the token
            before it, and mask false.
        experts: Completion.experts of all tokens up to the last that was sampled. Each turn computes those before it
            again, perhaps under a newer policy: of them the first choice is kept. None: not recorded.
    """

    prompt_ids: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    turns: list[Played] = field(default_factory=list)
    experts: NDArray[np.int16] | None = None

    @property
    def so_far(self) -> tuple[int, ...]:
        """The ids of the prompt and of all that follows it."""
        return (*self.prompt_ids, *self.ids)

    def sampled(self, completion: Completion, generate_ms: float) -> None:
        """Appends the policy's next turn."""
        start = len(self.ids)
        self.ids += completion.token_ids.tolist()
        self.logprobs += completion.logprobs.tolist()
        self.versions += completion.versions.tolist()
        self.mask += [True] * len(completion.token_ids)
        if completion.experts is not None:
            known = 0 if self.experts is None else len(self.experts)
            new = completion.experts[known:]
            self.experts = new if self.experts is None else np.concatenate([self.experts, new])
        self.turns.append(Played(start, len(self.ids), generate_ms))

    def all_experts(self) -> NDArray[np.int16] | None:
        """`experts` for all tokens but the last; -1 for those that came after the policy's last turn."""
        if self.experts is None:
            return None
        tokens = len(self.prompt_ids) + len(self.ids) - 1
        known = self.experts[:tokens]
        return np.pad(known, ((0, tokens - len(known)), (0, 0), (0, 0)), constant_values=-1)

    def read(self, ids: Sequence[int], version: int) -> None:
        """Appends tokens that the policy did not sample."""
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.versions += [version] * len(ids)
        self.mask += [False] * len(ids)


@dataclass(slots=True)
class Trajectory:
    """The trajectory that the policy and one environment make of a problem.

    Attributes:
        rows: one row; with env.history "template" one more wherever the chat template has rewritten what came before,
            and with env.use "program" wherever a request does not go on from the one before.
        place: index of the row to which tokens are appended.
        state: see rollout.env.protocol.Start.
        began: whether the environment was reset; before that the prompt is the problem's own.
        opening: the messages that the trajectory began with.
        messages: the conversation after the prompt, as reward functions are given it.
        written: the conversation after the prompt as the chat template is given it, with env.history "template".
        parts: name -> part of the reward: what score() gave, and the sum of the turns' rewards as "env".
        outcome: `done`, or one of CUT or FAULTS; "" while the trajectory goes on.
        fault: a sentence that says what was wrong with the environment.
    """

    rows: list[Row]
    place: int = -1
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
        """The row to which tokens are appended."""
        return self.rows[self.place]

    @property
    def turns(self) -> list[Played]:
        """The turns of all rows."""
        return [turn for row in self.rows for turn in row.turns]

    @property
    def faulted(self) -> bool:
        """Whether the trajectory ended by a fault of its environment."""
        return self.outcome in FAULTS

    def begin(self, start: Start, prompt_ids: tuple[int, ...]) -> None:
        """Records how the environment began, after its reset."""
        self.began, self.state, self.rows = True, start.state, [Row(prompt_ids)]
        self.opening = start.messages

    def spoke(self, turn: Turn) -> None:
        """Records the text and the tool calls of the newest turn."""
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in turn.calls]
        self.messages.append({"role": "assistant", "content": turn.text} | ({"tool_calls": calls} if calls else {}))
        self.row.turns[-1].calls, self.row.turns[-1].malformed = len(turn.calls), len(turn.malformed)

    def answered(self, step: Step, env_ms: float) -> None:
        """Records reward, time and metrics of the environment's answer to the newest turn, but not its messages."""
        self.row.turns[-1].env_ms, self.row.turns[-1].reward = env_ms, step.reward
        self.metrics.update(step.metrics)

    def observed(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        """Appends the messages of an answer, and their tokens behind what was sampled."""
        self.messages += messages
        self.row.read(ids, self.row.versions[-1])

    def rewritten(self, messages: Sequence[Message], prompt: Sequence[int]) -> None:
        """Begins another row, since rendering the conversation with this answer gave other ids than those so far.

        prompt: all ids of the rendered conversation. The new row's prompt is the beginning that they have in common
        with the first row's prompt, and at least one token.
        """
        self.messages += messages
        first, version = self.rows[0].prompt_ids, self.row.versions[-1]
        same = next((i for i, (a, b) in enumerate(zip(first, prompt, strict=False)) if a != b), len(first))
        size = max(same, 1)
        self.rows.append(Row(tuple(prompt[:size])))
        self.row.read(prompt[size:], version)

    def forked(self, messages: Sequence[Message], ids: Sequence[int], prompt: int) -> None:
        """Begins another row with these ids, of which the first `prompt`, and at least one, are its prompt.

        messages: what the conversation has in it that is not in `messages` yet.
        """
        self.messages += messages
        version = self.row.versions[-1]
        self.rows.append(Row(tuple(ids[:prompt])))
        self.place = len(self.rows) - 1
        self.row.read(ids[prompt:], version)

    def scored(self, parts: Mapping[str, float]) -> None:
        """Records the parts of the reward: `parts`, and the sum of the turns' rewards if there are any."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        self.parts = ({TURNS: float(sum(rewards))} if rewards else {}) | dict(parts)


# What a trajectory is played with: the model's format, and the policy.


class Writing(Protocol):
    """Writes a conversation as tokens. rollout.env.play.ChatDialogue implements it."""

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        """The prompt [P]: the messages, and the opening of the policy's turn."""
        ...

    def observe(self, messages: Sequence[Message], turn: Turn, tools: Sequence[ToolSpec]) -> tuple[int, ...] | None:
        """The tokens that follow a sampled turn: the messages that answer it, and the opening of the next turn. None if
        the chat template cannot continue behind the turn's last token."""
        ...

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        """False if the messages certainly have more than `tokens` tokens. They are not tokenised for this, since a
        megabyte takes seconds, in which all other trajectories wait."""
        ...

    def past(self, turn: Turn) -> Message:
        """A sampled turn as a message of the conversation."""
        ...


class Reading(Protocol):
    """Reads tokens as turns and messages. rollout.env.play.ChatDialogue implements it."""

    def read(self, token_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Turn:
        """The text and the tool calls of a sampled turn."""
        ...

    def shown(self, token_ids: Sequence[int]) -> Message:
        """The tokens that a program put between two turns, as a message. Raises EnvironmentFault for invalid ids."""
        ...

    def until(self, token_ids: Sequence[int], stop: Sequence[str]) -> tuple[int, str]:
        """How many of the tokens there are up to the first of these strings, with it, and which string that is; all of
        them and "" where none is written."""
        ...

    def told(self, turn: Turn) -> tuple[str, str]:
        """The thinking and the answer of a turn, as a client is told them; the answer without its calls."""
        ...


class Dialogue(Writing, Reading, Protocol):
    """Writes and reads a conversation. rollout.env.play.ChatDialogue implements it."""


class Policy(Protocol):
    """The policy as one trajectory asks it."""

    async def generate(self, token_ids: Sequence[int], max_tokens: int, turn: int) -> Completion:
        """Samples the turn number `turn`, from 0, behind token_ids (the prompt and all that followed)."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a trajectory.

    prompt: most tokens before the first turn. tokens: most tokens behind the prompt, observations included. turns: most
    turns of the policy. seconds: longest duration.
    """

    prompt: int
    tokens: int
    turns: int
    seconds: float
