"""Plays one trajectory: the policy samples a turn, the environment answers, until one side ends it.

Sampled tokens are kept as they were sampled, never tokenised again. Whatever the environment does wrong becomes the
trajectory's outcome. Player plays environments, rollout.env.programs plays programs, ChatDialogue writes and reads the
model's format.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from cluster.actor import within
from cluster.errors import WrongInput
from rollout.data.chat import Chat
from rollout.data.observation import UnclosedTurn
from rollout.data.ordinary_text import OwnText
from rollout.env.programs import Conversations, Drive
from rollout.env.protocol import Asked, Hosted, Message, Question, Start, Step, ToolSpec, Turn, own_messages
from rollout.env.tools.parser import answer_of, choose
from rollout.env.trajectory import Dialogue, EnvironmentFault, Limits, Policy, Row, Trajectory, Writing
from rollout.schema import Problem

# Two ways to add an answer to a trajectory: append it to the sampled tokens, or render the conversation anew.


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
                if isinstance(begun, Question | Asked):
                    drive = Drive if isinstance(begun, Question) else Conversations
                    await drive(trajectory, model, self._dialogue, self._limits).play(env, begun)
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

    def _begin(self, trajectory: Trajectory, begun: Start | Question | Asked, problem: Problem) -> Start:
        prompt = problem.prompt_ids
        if isinstance(begun, Question):
            start, prompt = Start((self._dialogue.shown(begun.token_ids),)), begun.token_ids
        else:
            start = begin(begun, problem)
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


def begin(begun: Start | Asked, problem: Problem) -> Start:
    """How a trajectory begins, with the messages of `opened`. What a program asks is its own text in any case."""
    if isinstance(begun, Asked):
        return Start(begun.messages, begun.tools)
    return replace(begun, messages=opened(begun, problem))


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
        self._choice = cache(lambda: choose(chat, parser))

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        try:
            return self._chat.converse(messages, tools)
        except WrongInput as error:
            raise EnvironmentFault("bad_observation", f"reset: {error}") from error

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        return sum(len(message["content"]) for message in messages) <= tokens * self._longest

    def read(self, token_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Turn:
        text = self._chat.decode(token_ids, special=True) if tools else ""
        calls, malformed = self._choice().parse(text, tools) if tools else ((), ())
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

    def until(self, token_ids: Sequence[int], stop: Sequence[str]) -> tuple[int, str]:
        text = self._chat.decode(token_ids)
        found = min(((text.find(one), one) for one in stop if one in text), default=None)
        if found is None:
            return len(token_ids), ""
        sizes = range(1, len(token_ids) + 1)
        return 1 + bisect_left(sizes, True, key=lambda size: found[1] in self._chat.decode(token_ids[:size])), found[1]

    def told(self, turn: Turn) -> tuple[str, str]:
        answer = answer_of(turn.text)
        thinking = turn.text.removesuffix(answer).strip().removeprefix("<think>").removesuffix("</think>").strip()
        if turn.calls:  # the mark of a call may be a special token
            mark = self._choice().mark
            text = answer_of(self._chat.decode(turn.token_ids, special=True))
            answer = text.partition(mark)[0].strip() if mark else ""
        return thinking, answer

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
