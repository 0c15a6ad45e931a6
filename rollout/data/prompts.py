"""Makes the messages of a prompt from a row of the data: from a column, a part of one, or a template over columns."""

import logging
import math
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from cluster.errors import WrongInput
from rollout.config import DataConfig
from rollout.data.files import Row

log = logging.getLogger("rollout")

PART = re.compile(r"\.([^.\[\]]+)|\[([^\[\]]+)\]")  # .text or [text]: one step into a nested column
CONVERSIONS: dict[str, Callable[[object], str]] = {"r": repr, "s": str, "a": ascii}
TOO_WIDE = re.compile(r"[0-9]{5}|[{}]")  # format specifications that could make texts of any length


class NoPrompt(WrongInput):
    """The row has none: null, or nothing but white space. It is left out (here and in learner.driver.preflight)."""


def prompts_of(rows: Sequence[Row], config: DataConfig, name: str) -> Iterator[tuple[int, list[dict[str, str]]]]:
    """The index and the messages of each row that has a prompt. Error messages call a row `<name>-<index>`.

    Some data sets of the hub have rows without a prompt. These are left out with a warning; WrongInput is raised if
    half of the rows or more have none, or if a row is wrong.
    """
    empty: list[NoPrompt] = []
    for index, row in enumerate(rows):
        try:
            messages = messages_of(row, config, f"{name}-{index}")
        except NoPrompt as error:
            empty.append(error)
            if 2 * len(empty) >= len(rows):
                raise empty[0] from None
        else:
            yield index, messages
    if empty:
        log.warning("%s: left out %d of %d rows without a prompt; %s", name, len(empty), len(rows), empty[0])


def messages_of(row: Row, config: DataConfig, where: str) -> list[dict[str, str]]:
    """The messages that `data.prompt` and `data.system` make of a row. Raises WrongInput; NoPrompt if there is none.

    where: name of the row in error messages.
    """
    if config.by_environment:
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        return [*system, {"role": "user", "content": ""}]
    value = _prompt(row, str(config.prompt))
    if isinstance(value, str) and config.system is None and value.strip():  # the usual case, fast for a million rows
        return [{"role": "user", "content": value}]
    if isinstance(value, float) and math.isnan(value):  # pandas writes nan for a missing text
        value = None
    turns = [{"role": "user", "content": value}] if isinstance(value, str) else _turns(value, where)
    said = [bool(turn["content"].strip()) for turn in _asking(turns or [])]
    if not turns or not all(said):
        kind = NoPrompt if value is None or (turns is not None and not any(said)) else WrongInput
        raise kind(
            f"data.prompt: {config.prompt!r} must give a text or a list of {{role, content}} messages, not empty; "
            f"{where} gives {repr(value)[:80]}; name another column, or repair that row"
        )
    if turns[-1]["role"] == "assistant":
        raise WrongInput(
            f"data.prompt: {config.prompt!r} must end before the answer, and {where} ends with an assistant's message, "
            "which the policy would read before it writes its own; name a column without it, or take it out"
        )
    if config.system is None:
        return turns
    if turns[0]["role"] == "system":
        raise WrongInput(
            f"data.system: must be null where the data brings its own system message, and {where} does; "
            "remove one of them"
        )
    return [{"role": "system", "content": config.system}, *turns]


@contextmanager
def said_of_teacher() -> Iterator[None]:
    """Errors about prompts name the settings of a teacher's prompt (data.teacher) in place of those of the policy's."""
    try:
        yield
    except WrongInput as error:
        said = re.sub(r"\bdata\.(prompt|system)\b", r"data.teacher.\1", str(error))
        raise WrongInput(said.replace("rollout.max_prompt_length", "data.teacher.max_prompt_length")) from error


def check_column(columns: Row, prompt: str) -> None:
    """Raises WrongInput if `prompt` (data.prompt) is a name, not a template, and there is no such column."""
    if prompt.isidentifier() and prompt not in columns:
        _prompt(columns, prompt)


def _asking(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    """The messages that must not be empty: all but system messages, if there are others."""
    return [turn for turn in turns if turn["role"] != "system"] or turns


def _turns(value: Any, where: str) -> list[dict[str, str]] | None:
    """The messages of a conversation, with their contents as text; None if the value is no conversation."""
    if not isinstance(value, list):
        return None
    turns = []
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return None
        if "content" not in message or not isinstance(message["content"], str | list | None):
            return None
        if message.get("tool_calls"):
            raise WrongInput(f"data.prompt: {where} has tool_calls, which are not supported; take them out")
        turns.append({"role": message["role"], "content": _text(message.get("content"), where)})
    return turns


def _text(content: Any, where: str) -> str:
    """A message's content as text. Texts of content parts are joined by line breaks, as vLLM's own server does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise WrongInput(
                f"data.prompt: content parts must be {{type: text, text: ...}}, and {where} has one of type {kind!r}; "
                "take it out, since only text is trained on"
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _prompt(row: Row, prompt: str) -> Any:
    """The value of the column `prompt`, or the template `prompt` filled from the columns."""
    if prompt in row:
        return row[prompt]
    try:
        parts = list(string.Formatter().parse(prompt))
    except ValueError as error:
        raise WrongInput(
            f"data.prompt: must be a column or a template such as 'Solve: {{question}}', got {prompt!r} ({error}); "
            "write a literal brace twice"
        ) from error
    if all(field is None for _, field, _, _ in parts):
        return _column(row, prompt)
    texts = []
    for literal, field, spec, conversion in parts:
        texts.append(literal)
        if field is not None:
            value = _column(row, field)
            if value is None:
                return None
            texts.append(_formatted(value, field, spec or "", conversion))
    return "".join(texts)


def _formatted(value: Any, field: str, spec: str, conversion: str | None) -> str:
    if isinstance(value, Mapping):
        names = ", ".join(map(str, value))
        raise WrongInput(
            f"data.prompt: {{{field}}} must be a text or a number, and it is a mapping of {names}; write for example "
            f"{{{field}[{next(iter(value), 'text')}]}}"
        )
    try:
        if TOO_WIDE.search(spec):
            raise ValueError("a width must be below 10000")
        converted = value if conversion is None else CONVERSIONS[conversion](value)
        return format(converted, spec)
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        as_written = f"!{conversion}" * (conversion is not None) + f":{spec}"
        raise WrongInput(
            f"data.prompt: {{{field}}} cannot be written as {as_written!r} ({error}); write {{{field}}}"
        ) from None


def _column(row: Row, field: str) -> Any:
    """The value of a column, or of the part of a nested column that is named like `problem[text]` or `problem.text`."""
    if field in row:
        return row[field]
    first = re.split(r"[.\[]", field, maxsplit=1)[0]
    steps = field[len(first) :]
    if first not in row or "".join(match[0] for match in PART.finditer(steps)) != steps:
        near = get_close_matches(field, row, n=1)
        raise WrongInput(
            f"data.prompt: must be a column or a template over columns, and there is no column {field!r}; columns "
            f"are {', '.join(row)}" + (f"; did you mean {near[0]!r}?" if near else "; name one of them")
        )
    value = row[first]
    for match in PART.finditer(steps):
        name = match[1] or match[2]
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and len(name) < 9 and int(name) < len(value):
            value = value[int(name)]
        elif value is None:
            return None
        else:
            there = f"has {', '.join(map(str, value))}" if isinstance(value, Mapping) else f"is {_kind(value)}"
            raise WrongInput(f"data.prompt: there is no {name!r} in {field!r}: what it is looked for in {there}")
    return value


def _kind(value: Any) -> str:
    return f"a list of {len(value)}" if isinstance(value, list) else f"a {type(value).__name__}"
