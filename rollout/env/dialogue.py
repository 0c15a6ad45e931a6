"""Trajectories in a model's own words: its chat template around what the policy samples, which stays as it is."""

from collections.abc import Sequence
from functools import cache

from rollout.data.chat import Chat
from rollout.data.chat_error import ChatError
from rollout.data.observation import UnclosedTurn
from rollout.data.ordinary_text import OwnText
from rollout.env.protocol import Message, ToolSpec, Turn
from rollout.env.tools.tool_parser import choose
from rollout.env.trajectory import EnvironmentFault


class ChatDialogue:
    """A rollout.env.play.Dialogue.

    Args:
        parser: env.tool_parser, chosen when there are tools for the first time (rollout.env.tools.tool_parser).
        ends: tokens that end a turn.
    """

    def __init__(self, chat: Chat, parser: str, ends: Sequence[int]) -> None:
        self._chat, self._ends = chat, frozenset(ends)
        self._longest = max(map(len, chat.tokenizer.get_vocab()))  # characters that one token stands for, at most
        self._parse = cache(lambda: choose(chat, parser).parse)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        try:
            return self._chat.converse(messages, tools)
        except ChatError as error:
            raise EnvironmentFault("bad_observation", f"reset: {error}") from error

    def may_fit(self, messages: Sequence[Message], tokens: int) -> bool:
        return sum(len(message["content"]) for message in messages) <= tokens * self._longest

    def read(self, token_ids: Sequence[int], tools: Sequence[ToolSpec]) -> Turn:
        calls, malformed = self._parse()(self._chat.decode(token_ids, special=True), tools) if tools else ((), ())
        return Turn(self._chat.decode(token_ids), tuple(token_ids), calls, malformed)

    def observe(self, messages: Sequence[Message], turn: Turn, tools: Sequence[ToolSpec]) -> tuple[int, ...] | None:
        last = turn.token_ids[-1]
        try:
            # A turn that a stop string ended is closed by the template's own ending, which the policy did not sample.
            return self._chat.observe(messages, last if last in self._ends else None, tools)
        except UnclosedTurn:
            return None
        except ChatError as error:
            raise EnvironmentFault("bad_observation", f"step: {error}") from error

    def past(self, turn: Turn) -> Message:
        ids = turn.token_ids[:-1] if turn.token_ids[-1] in self._ends else turn.token_ids
        # Calls stay as they were written, with the special tokens that were sampled.
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
