"""How an answer gets into a conversation: behind what was sampled, or in a conversation that is rendered anew."""

from collections.abc import Callable, Sequence
from typing import Protocol

from rollout.env.protocol import Message, Start, ToolSpec, Turn
from rollout.env.trajectory import Trajectory


class Writing(Protocol):
    """How a conversation is written as tokens: rollout.env.dialogue.ChatDialogue."""

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        """The prompt [P]: the messages, and the opening of the policy's turn."""
        ...

    def observe(self, messages: Sequence[Message], turn: Turn, tools: Sequence[ToolSpec]) -> tuple[int, ...] | None:
        """The tokens that follow a sampled turn which these messages answer, up to the opening of the next turn; None
        if the template cannot go on from the turn's last token."""
        ...

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        """False if messages certainly have more tokens, found without making tokens of them: that of a megabyte takes
        seconds, in which every other trajectory waits."""
        ...

    def past(self, turn: Turn) -> Message:
        """A sampled turn as a message of the conversation."""
        ...


Answer = Callable[[Trajectory, Turn, Sequence[Message], Start], str]
"""Adds the messages that answer a turn -> the outcome if the trajectory cannot go on with them, else "". The start's
messages are those that the trajectory began with."""


class Append:
    """env.history "append": the answer is all that is written. tokens: most of what follows the prompt."""

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
    """env.history "template": the whole conversation is rendered as the chat template has it.

    Where that begins with what was asked and sampled so far, the rest is appended. Where the template writes the past
    differently (it leaves out thinking, say), the conversation goes on in another row, in which only what is sampled
    from then on is learned; what was sampled before is learned in its own row, as it was sampled.
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
"""env.history -> how answers are written; "refuse" differs before the run only."""
