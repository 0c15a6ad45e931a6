"""Preference pairs for a reward model: rows of prompt, chosen and rejected, in TRL's preference format, as token ids.

Both answers are written as a run would have them: the prompt as the policy is given it, then the answer's text and the
token that ends a turn, so that what is learned here is what is scored there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.data import sources
from rollout.data.chat import Chat, ChatError
from rollout.data.files import Names, Row
from rollout.data.observation import MARKER, USER

Message = dict[str, str]
PAIRS, EVAL = Names("pairs", "--split", others=""), Names("--eval", "--eval-split", others="")


class PairsError(ValueError):
    """Pairs that cannot be learned from; one line that says which, and what to do."""


class NoPair(PairsError):
    """An answer is missing, or empty."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Token ids: [P] of the prompt, [T] of each answer, the end token included."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longer sequence."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def read_pairs(path: str, chat: Chat, split: str | None = None, names: Names = PAIRS) -> list[Pair]:
    """Of a file, a folder or a hub data set, whose split is train unless `split` says another.

    A prompt may be a text or messages, the answers texts or messages that follow it, or whole conversations; without a
    prompt these begin alike. The two answers may be equal. Rows without one of them are left out, which is said.

    Raises PairsError, and what rollout.data.sources raises (ProblemsError), which calls its arguments `names`.
    """
    end, pairs, wrong, empty = _end(chat), [], [], []
    rows = sources.read(path, split, {}, None, seed=0, names=names)
    for number, row in enumerate(rows, start=1):
        try:
            pairs.append(_pair(row, chat, end, f"{path}, row {number}"))
        except NoPair as error:
            empty.append(error)
        except PairsError as error:
            wrong.append(error)
    if 2 * len(empty) >= len(rows):
        wrong = empty + wrong
    if len(wrong) > 1:
        raise PairsError(f"{wrong[0]}; {len(wrong) - 1} other rows cannot be learned from either")
    if wrong:
        raise wrong[0]
    if empty:
        print(f"{len(empty)} of {len(rows)} rows are left out: {empty[0]}")
    return pairs


def _end(chat: Chat) -> str:
    """What the model writes at the end of its turn, as text."""
    if not chat.has_template:
        return str(chat.tokenizer.eos_token or "")
    turn = [USER, {"role": "assistant", "content": MARKER}]
    past = chat.observations.until_stop(chat.observations.render(turn, opened=False))
    return past.partition(MARKER)[2]


def _pair(row: Row, chat: Chat, end: str, where: str) -> Pair:
    missing = [name for name in ("chosen", "rejected") if row.get(name) in (None, "", [])]
    if missing:
        raise NoPair(
            f"pairs: each row must give chosen and rejected, {where} has no {' and no '.join(missing)} (its columns: "
            f"{', '.join(row)}); rename the columns, or take the row out"
        )
    prompt = _messages(row.get("prompt") or [], "user", f"prompt of {where}")
    chosen, rejected = (_answer(row, name, prompt, where) for name in ("chosen", "rejected"))
    if not prompt and isinstance(row["chosen"], str):
        raise PairsError(f"pairs: texts need a prompt beside them, {where} has none; add a column prompt")
    while len(chosen) > 1 and len(rejected) > 1 and chosen[0] == rejected[0]:
        prompt, chosen, rejected = [*prompt, chosen[0]], chosen[1:], rejected[1:]
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if [message["role"] for message in answer] != ["assistant"]:
            roles = ", ".join(message["role"] for message in answer)
            raise PairsError(
                f"pairs: behind what both have in common must stand one message of role assistant, {name} of {where} "
                f"has the roles {roles}; take the row out"
            )
    if not prompt:
        raise PairsError(f"pairs: each row must ask something, {where} has nothing before its answers; take it out")
    try:
        _, ids = chat.render(prompt)
    except ChatError as error:
        raise PairsError(
            f"pairs: the model must be able to read each prompt, and not that of {where} ({error})"
        ) from None
    answers = (_encoded(chat, f"{answer[0]['content']}{end}") for answer in (chosen, rejected))
    return Pair(ids, *answers)


def _answer(row: Row, name: str, prompt: Sequence[Message], where: str) -> list[Message]:
    """What follows the prompt, which a whole conversation begins with: that would otherwise be read twice."""
    answer = _messages(row[name], "assistant", f"{name} of {where}")
    if prompt and len(answer) > len(prompt) and answer[: len(prompt)] == list(prompt):
        answer = answer[len(prompt) :]
    if prompt and answer[0]["role"] != "assistant":
        raise PairsError(
            f"pairs: what follows the prompt must begin with role assistant, or be a conversation that begins with the "
            f"prompt's own messages; {name} of {where} begins with role {answer[0]['role']}; take the row out, or its "
            "prompt"
        )
    return answer


def _encoded(chat: Chat, text: str) -> tuple[int, ...]:
    return tuple(chat.tokenizer.encode(text, add_special_tokens=False))


def _messages(value: Any, role: str, where: str) -> list[Message]:
    """A text as one message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence) or not all(_is_message(one) for one in value):
        raise PairsError(
            f"pairs: must be a text or a list of {{role, content}} messages with texts, {where} is {str(value)[:80]!r}"
            "; repair it, or take the row out"
        )
    return [{"role": one["role"], "content": one["content"]} for one in value]


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))
