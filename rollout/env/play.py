"""Plays one trajectory: the policy samples a turn, the environment answers, until one side ends it.

Sampled tokens are kept as they were sampled, never tokenised again. Whatever the environment does wrong becomes the
trajectory's outcome. Player plays environments, Drive plays programs, ChatDialogue writes and reads the model's format.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.actor import within
from cluster.errors import WrongInput
from rollout.data.chat import Chat
from rollout.data.observation import UnclosedTurn
from rollout.data.ordinary_text import OwnText
from rollout.env.protocol import (
    Hosted,
    Message,
    NoMore,
    Question,
    Sampled,
    Start,
    Step,
    ToolSpec,
    Turn,
    own_messages,
)
from rollout.env.tools.parser import choose
from rollout.schema import Problem
from rollout.types import Completion

# The record of a trajectory, which grows with each turn.

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
        rows: one row; with env.history "template" one more wherever the chat template has rewritten what came before.
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
        """The newest row, to which tokens are appended."""
        return self.rows[-1]

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

    def scored(self, parts: Mapping[str, float]) -> None:
        """Records the parts of the reward: `parts`, and the sum of the turns' rewards if there are any."""
        rewards = [turn.reward for turn in self.turns if turn.reward is not None]
        self.parts = ({TURNS: float(sum(rewards))} if rewards else {}) | dict(parts)


# Two ways to add an answer to a trajectory: append it to the sampled tokens, or render the conversation anew.


class Writing(Protocol):
    """Writes a conversation as tokens. ChatDialogue implements it."""

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


Answer = Callable[[Trajectory, Turn, Sequence[Message], Start], str]
"""Adds the messages that answer a turn to the trajectory. Returns the outcome if the trajectory cannot go on with them,
else "". Start holds the messages that the trajectory began with."""


class Append:
    """env.history "append": only the answer is written, behind the sampled tokens. tokens: most behind the prompt."""

    def __init__(self, writing: Writing, tokens: int) -> None:
        self._writing, self._tokens = writing, tokens

    def __call__(self, trajectory: Trajectory, turn: Turn, messages: Sequence[Message], start: Start) -> str:
        if not self._writing.may_fit(messages, self._tokens - len(trajectory.row.ids)):
            return "length"
        seen = self._writing.observe(messages, turn, start.tools)
        if seen is None:
            return "unclosed"
        if len(trajectory.row.ids) + len(seen) >= self._tokens:
            return "length"
        trajectory.observed(messages, seen)
        return ""


class Render:
    """env.history "template": the chat template renders the whole conversation after each answer.

    If the result begins with the tokens so far, its rest is appended. If the template writes the past differently (for
    example without thinking), the conversation goes on in another row. Each token is trained on in the row in which it
    was sampled. tokens: most behind the prompt.
    """

    def __init__(self, writing: Writing, tokens: int) -> None:
        self._writing, self._tokens = writing, tokens

    def __call__(self, trajectory: Trajectory, turn: Turn, messages: Sequence[Message], start: Start) -> str:
        if not self._writing.may_fit(messages, self._tokens):
            return "length"
        trajectory.written += [self._writing.past(turn), *messages]
        prompt = self._writing.open([*start.messages, *trajectory.written], start.tools)
        so_far, first = trajectory.row.so_far, trajectory.rows[0].prompt_ids
        if len(prompt) - len(first) >= self._tokens:
            return "length"
        if prompt[: len(so_far)] == so_far:
            trajectory.observed(messages, prompt[len(so_far) :])
        else:
            trajectory.rewritten(messages, prompt)
        return "" if len(trajectory.row.ids) < self._tokens else "length"


HISTORIES: dict[str, Callable[[Writing, int], Answer]] = {"append": Append, "refuse": Append, "template": Render}
"""env.history -> how answers are written. "refuse" differs from "append" only in a check before the run."""


# The trajectory of a program: each prompt that it asks with extends what was asked and sampled before.


class Reading(Protocol):
    """Reads tokens as turns and messages. ChatDialogue implements it."""

    def read(self, token_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Turn:
        """The text and the tool calls of a sampled turn."""
        ...

    def shown(self, token_ids: Sequence[int]) -> Message:
        """The tokens that a program put between two turns, as a message. Raises EnvironmentFault for invalid ids."""
        ...


class Policy(Protocol):
    """The policy as one trajectory asks it."""

    async def generate(self, token_ids: Sequence[int], max_tokens: int, turn: int) -> Completion:
        """Samples the turn number `turn`, from 0, behind token_ids (the prompt and all that followed)."""
        ...


class Drive:
    """Plays one trajectory of a program. tokens: most behind the first prompt. turns: most turns of the policy."""

    def __init__(self, trajectory: Trajectory, model: Policy, dialogue: Reading, tokens: int, turns: int) -> None:
        self._trajectory, self._model, self._dialogue = trajectory, model, dialogue
        self._tokens, self._turns = tokens, turns
        self._cut = ""  # the outcome, if the program was refused a turn

    async def play(self, env: Hosted, asked: Question) -> None:
        """Answers the program's prompts until it ends, and sets the outcome. Raises EnvironmentFault if a prompt does
        not extend what came before."""
        while True:
            answer = await self._answer(asked)
            begun = time.perf_counter()
            step = await env.step(answer)
            took = (time.perf_counter() - begun) * 1e3
            if isinstance(step, Step):
                break
            if self._trajectory.row.turns:
                self._trajectory.row.turns[-1].env_ms += took
            asked = step
        if self._trajectory.row.turns:
            self._trajectory.answered(step, self._trajectory.row.turns[-1].env_ms + took)
        self._trajectory.outcome = self._cut or "done"

    async def _answer(self, asked: Question) -> Sampled | NoMore:
        trajectory = self._trajectory
        so_far = trajectory.row.so_far
        if asked.token_ids[: len(so_far)] != so_far:
            raise EnvironmentFault(
                "branched",
                f"run: the prompt of turn {len(trajectory.turns) + 1} must extend all that was asked and sampled "
                "before it, and does not; keep the sampled ids instead of encoding their text again",
            )
        seen = asked.token_ids[len(so_far) :]
        room = self._tokens - len(trajectory.row.ids) - len(seen)
        if len(trajectory.turns) == self._turns:
            self._cut = self._cut or "turns"
            return NoMore(f"the trajectory has had its {self._turns} turns (env.max_turns)")
        if room < 1:
            self._cut = self._cut or "length"
            return NoMore(f"the trajectory has had its {self._tokens} tokens (rollout.max_completion_length)")
        if seen:
            trajectory.observed((self._dialogue.shown(seen),), seen)
        return await self._sampled(asked, room)

    async def _sampled(self, asked: Question, room: int) -> Sampled:
        trajectory, begun = self._trajectory, time.perf_counter()
        most = room if asked.max_tokens is None else min(room, asked.max_tokens)
        completion = await self._model.generate(list(asked.token_ids), most, len(trajectory.turns))
        trajectory.row.sampled(completion, (time.perf_counter() - begun) * 1e3)
        trajectory.spoke(self._dialogue.read(completion.token_ids.tolist(), ()))
        # A turn is cut off only if the run's limit of tokens ended it, and not the program's own max_tokens.
        self._cut = "length" if completion.finish_reason == "length" and most == room else ""
        return Sampled(completion.token_ids.tolist(), completion.logprobs.tolist(), completion.finish_reason)


class Dialogue(Writing, Reading, Protocol):
    """Writes and reads a conversation. ChatDialogue implements it."""


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


class Player:
    """Plays trajectories within limits. history: env.history."""

    def __init__(self, dialogue: Dialogue, limits: Limits, history: str = "append") -> None:
        self._dialogue, self._limits = dialogue, limits
        self._answer = HISTORIES[history](dialogue, limits.tokens)

    async def play(self, env: Hosted, model: Policy, problem: Problem, seed: int) -> Trajectory:
        """Plays a whole trajectory. A fault of the environment becomes the outcome; errors of the engine are raised.

        The caller, who made the environment, closes it.
        """
        trajectory = Trajectory([Row(problem.prompt_ids)])
        clock = within(self._limits.seconds)
        try:
            async with clock:
                begun = await env.reset(problem, seed)
                start = self._begin(trajectory, begun, problem)
                if isinstance(begun, Question):
                    limits = self._limits
                    await Drive(trajectory, model, self._dialogue, limits.tokens, limits.turns).play(env, begun)
                while not trajectory.outcome:
                    await self._turn(trajectory, env, model, start)
                trajectory.scored(await env.score())
        except EnvironmentFault as fault:
            trajectory.outcome, trajectory.fault = fault.outcome, fault.sentence
        except TimeoutError:
            if not clock.expired():
                raise
            sentence = f"the trajectory took more than {self._limits.seconds:g} s (cluster.patience)"
            trajectory.outcome, trajectory.fault = "env_timeout", sentence
        return trajectory

    def _begin(self, trajectory: Trajectory, begun: Start | Question, problem: Problem) -> Start:
        prompt = problem.prompt_ids
        if isinstance(begun, Question):
            start, prompt = Start((self._dialogue.shown(begun.token_ids),)), begun.token_ids
        else:
            start = replace(begun, messages=opened(begun, problem))
            if not self._dialogue.may_fit(start.messages, self._limits.prompt):
                raise EnvironmentFault(
                    "bad_observation",
                    f"reset: its messages have {sum(len(message['content']) for message in start.messages)} "
                    f"characters, more than rollout.max_prompt_length, {self._limits.prompt}, can hold",
                )
            if begun.messages or begun.tools:
                prompt = self._dialogue.open(start.messages, start.tools)
        trajectory.begin(start, prompt)
        if len(prompt) > self._limits.prompt:
            raise EnvironmentFault(
                "bad_observation",
                f"reset: its messages have {len(prompt)} tokens, and rollout.max_prompt_length is "
                f"{self._limits.prompt}",
            )
        return start

    async def _turn(self, trajectory: Trajectory, env: Hosted, model: Policy, start: Start) -> None:
        """Plays the policy's next turn and the environment's answer; sets the outcome if the turn is the last."""
        limits, begun = self._limits, time.perf_counter()
        row, played = trajectory.row, len(trajectory.turns)
        completion = await model.generate(row.so_far, limits.tokens - len(row.ids), played)
        row.sampled(completion, _ms(begun))
        turn = self._dialogue.read(completion.token_ids.tolist(), start.tools)
        trajectory.spoke(turn)
        if completion.finish_reason == "length":
            trajectory.outcome = "length"
            return
        begun = time.perf_counter()
        step = await env.step(turn)
        assert isinstance(step, Step)
        trajectory.answered(step, _ms(begun))
        if step.done or played + 1 == limits.turns:
            trajectory.outcome = "done" if step.done else "turns"
            return
        trajectory.outcome = self._answer(trajectory, turn, step.messages, start)


def opened(start: Start, problem: Problem) -> tuple[Message, ...]:
    """The messages that a trajectory begins with: the environment's, or if it gives none the problem's own.

    Special tokens in the text of the problem's messages count as such (OwnText), as in every prompt of the data.
    """
    own = own_messages(problem)
    return tuple(
        {**message, "content": OwnText(message["content"])} if message in own else message
        for message in start.messages or own
    )


def _ms(since: float) -> float:
    return (time.perf_counter() - since) * 1e3


class ChatDialogue:
    """The Dialogue in the format of a model's chat template.

    Args:
        parser: env.tool_parser; a parser is chosen when there are tools for the first time (rollout.env.tools.parser).
        ends: ids of the tokens that end a turn.
    """

    def __init__(self, chat: Chat, parser: str, ends: Sequence[int]) -> None:
        self._chat, self._ends = chat, frozenset(ends)
        self._longest = max(map(len, chat.tokenizer.get_vocab()))  # most characters that one token stands for
        self._parse = cache(lambda: choose(chat, parser).parse)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        try:
            return self._chat.converse(messages, tools)
        except WrongInput as error:
            raise EnvironmentFault("bad_observation", f"reset: {error}") from error

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        return sum(len(message["content"]) for message in messages) <= tokens * self._longest

    def read(self, token_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Turn:
        calls, malformed = self._parse()(self._chat.decode(token_ids, special=True), tools) if tools else ((), ())
        return Turn(self._chat.decode(token_ids), tuple(token_ids), calls, malformed)

    def observe(self, messages: Sequence[Message], turn: Turn, tools: Sequence[ToolSpec]) -> tuple[int, ...] | None:
        last = turn.token_ids[-1]
        try:
            # If a stop string ended the turn, the template's own ending follows, which the policy did not sample.
            return self._chat.observe(messages, last if last in self._ends else None, tools)
        except UnclosedTurn:
            return None
        except WrongInput as error:
            raise EnvironmentFault("bad_observation", f"step: {error}") from error

    def past(self, turn: Turn) -> Message:
        ids = turn.token_ids[:-1] if turn.token_ids[-1] in self._ends else turn.token_ids
        # The text keeps tool calls as they were sampled, with their special tokens.
        return {"role": "assistant", "content": OwnText(self._chat.decode(ids, special=True))}

    def shown(self, token_ids: Sequence[int]) -> Message:
        size = len(self._chat.tokenizer)
        if not all(0 <= token < size for token in token_ids):
            raise EnvironmentFault("bad_observation", f"run: token ids must lie in 0..{size - 1}, got others")
        if token_ids and token_ids[-1] in self._ends:
            end = self._chat.decode(token_ids[-1:], special=True)
            raise EnvironmentFault(
                "bad_observation",
                f"run: a prompt must not end with a stop token, behind which the policy would not answer, and one ends "
                f"with {end!r}: open the turn behind it, or encode text without special tokens",
            )
        return {"role": "user", "content": self._chat.decode(token_ids)}
