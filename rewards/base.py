"""Defines what a reward function is, for the rest of this package; has TRL's hooks, the errors, and helpers by which
reward functions read completions and gold answers.

A reward function (plain or `async def`) scores a group of completions, in TRL's convention, so that functions written
for TRL or open-r1 work unchanged:

    def my_reward(prompts, completions, completion_ids, answer, **kwargs) -> list[float | None]

* It is called with keyword arguments only: `prompts`, `completions`, `completion_ids` (token ids of each completion)
  and one list per data column, each already repeated once per completion. All lists have the same length.
* A function without `**kwargs` receives only the parameters that it names; one with `**kwargs` receives every column.
  As in TRL, the data columns `prompt`, `completion` and `completion_ids` are not passed, except a `prompt` or
  `completion` that an arg of a built-in names (`column: completion`).
* If the model has a chat template, a prompt is a list of messages, even if the data has a text, and a completion is
  `[{"role": "assistant", "content": "..."}]`. Without a template both are strings. `text_of` reads either form.
* `args` of the configuration are passed in every call and take precedence over a column of the same name.
* The function returns one number per completion, in a list or another ordered collection (tuple, array, generator), or
  None for a completion that it does not score. As in TRL, the sum of the other functions then counts, so each task of a
  mixed data set can have its own function. A completion that no function scores is left out of training (status
  `none`); TRL gives it 0. NaN, infinity, a number beyond 1e30 and anything that is not a number are failures: the
  completion gets status `nan` and no reward.
* A function with the parameters of verl, OpenRLHF or ms-swift, or one for a single completion, is used as it is
  (rewards.call).
* Calls of an `async def` for several groups run at the same time, on one event loop.

Of TRL's extras, `trainer_state` has `global_step`, `max_steps` and `epoch`. `log_metric(name, value)` writes
`log/<name>` in metrics.jsonl, the mean over groups, and `log_extra(column, values)` writes a text beside each
completion in the rollouts. `environments` is not provided, since reward functions and environments run in different
processes; a function that requires it is refused before training starts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

Values = Iterable[float | None]
Reward = Callable[..., Values | Awaitable[Values]]

JUDGE = "judge"  # the `use` of a language model that judges completions
ADAPTER = "adapter:"  # begins the `use` of a reward model that is an adapter on the learner's base
LARGEST = 1e30  # the largest reward, so that weighted sums of rewards fit float32, which ends at 3.4e38
TRL_EXTRAS = ("environments",)


class Zeroed(list[float]):
    """The values that one of gleaner's own reward functions returns. why: by index of a completion, the reason for a
    nan, or for a 0 that is not a wrong answer (for example code that was late or ended its process)."""

    def __init__(self, values: Sequence[float], why: Mapping[int, str]) -> None:
        super().__init__(values)
        self.why = dict(why)


def writable(text: str) -> str:
    """The text with each lone surrogate, which no file or Arrow column accepts, replaced by a backslash escape."""
    return text.encode(errors="backslashreplace").decode()


def said(error: BaseException) -> str:
    """The text of another library's or the user's exception, on one line, even if its __str__ raises."""
    try:
        return writable(" ".join(str(error).split()))
    except BaseException as second:
        return f"its text cannot be read, since its __str__ raises {type(second).__name__}"


def counts(number: float) -> bool:
    """Whether the number is allowed as a reward: it is finite, and its absolute value is at most LARGEST."""
    return abs(number) <= LARGEST


# TRL's hooks, further arguments of a reward function: it logs more than its values by `log_metric` and `log_extra`, and
# reads from `trainer_state` how far the run is.

NAMES = ("trainer_state", "log_extra", "log_metric")
MOST = 64  # names of metrics, and of extra columns, that one call may log
LONGEST_NAME, LONGEST_TEXT = 100, 2000  # characters that are kept


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the run is when a group is scored. step: optimizer steps of the newest policy that its generator has.
    steps: of the whole run. epoch: of the data."""

    step: int = 0
    steps: int = 0
    epoch: int = 0


BEGIN = Progress()


class TrainerState:
    """The fields of transformers' TrainerState that gleaner provides."""

    def __init__(self, progress: Progress) -> None:
        self.global_step, self.max_steps, self.epoch = progress.step, progress.steps, float(progress.epoch)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state.{name}: here it has global_step, max_steps and epoch")


@dataclass(frozen=True, slots=True)
class Told:
    """What one call logged. metrics: means of the logged values by name. extras: by column, a text per completion."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Log:
    """Collects what one call of a reward function logs, for a group of `size` completions."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._metrics: dict[str, list[float]] = {}
        self._extras: dict[str, list[str]] = {}

    def metric(self, name: str, value: float) -> None:
        """Implements `log_metric`; ignores values that are not finite. Raises ValueError if the value is no number, or
        beyond MOST names."""
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"log_metric: {name!s:.40} must be a number, got {type(value).__name__}") from error
        if math.isfinite(number):
            _of(self._metrics, name, "log_metric").append(number)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """Implements `log_extra`. Raises ValueError unless there is one value per completion, or beyond MOST names."""
        given = list(values)
        if len(given) != self._size:
            raise ValueError(
                f"log_extra: {column!s:.40} must have one value for each of {self._size} completions, got {len(given)}"
            )
        _of(self._extras, column, "log_extra")[:] = [_text(value) for value in given]

    def told(self) -> Told:
        return Told({name: math.fsum(values) / len(values) for name, values in self._metrics.items()}, self._extras)


def _of(known: dict[str, Any], name: object, function: str) -> Any:
    key = writable(str(name))[:LONGEST_NAME]
    if key not in known and len(known) == MOST:
        raise ValueError(f"{function}: at most {MOST} names, and {key!r} is one more")
    return known.setdefault(key, [])


def _text(value: Any) -> str:
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError):
            value = str(value)
    return writable(value)[:LONGEST_TEXT]


def by_row(told: Sequence[Told], size: int) -> list[list[tuple[str, float | None, str | None]]]:
    """What several functions logged, by completion of the group: a list of (name, number or None, text or None). A
    metric that several functions logged has their mean."""
    metrics: dict[str, list[float]] = {}
    texts: dict[str, Sequence[str]] = {}
    for one in told:
        for name, value in one.metrics.items():
            metrics.setdefault(name, []).append(value)
        texts |= one.extras
    same = [(name, math.fsum(values) / len(values), None) for name, values in metrics.items()]
    return [[*same, *((name, None, column[i]) for name, column in texts.items())] for i in range(size)]


# Helpers for reward functions, which read completions, gold answers and columns.


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a completion, which is a string or a list of messages.

    Only the assistant's messages count, since tool output is not the policy's work; they are joined by newlines. A
    content of several parts contributes its text parts.
    """
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return "\n".join(_content(message.get("content")) for message in said)


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a prompt; that of a list of messages is all their texts, without the tokens of a chat template."""
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(_content(message.get("content")) for message in prompt)


def _content(content: Any) -> str:
    if content is None:  # an assistant message that only calls tools
        return ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content)


_OPENING = re.compile(r"<([A-Za-z_][\w.-]*)>\s*\Z")


def opening_at_end(prompt: str) -> str:
    """The opening tag at the end of a prompt's text, with the white space behind it; "" if there is none. Templates
    that prefill <think> end so, and the completions then begin inside the tag."""
    found = _OPENING.search(prompt)
    return "" if found is None else found[0]


def tag_of(opening: str) -> str:
    """The name of the tag that `opening_at_end` returned."""
    return opening.strip()[1:-1]


def behind(opening: str, completion: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """The completion with the opening tag of its prompt in front of its text, or of its first assistant's message."""
    if isinstance(completion, str):
        return opening + completion
    said = list(completion)
    first = next((i for i, message in enumerate(said) if message.get("role", "assistant") == "assistant"), None)
    if first is not None:
        said[first] = {**said[first], "content": opening + _content(said[first].get("content"))}
    return said


def tagged(text: str, tag: str) -> str | None:
    """The stripped text inside the last closed `<tag>...</tag>`, or None if there is none. If several `</tag>` follow,
    the text ends at the first of them."""
    start = text.rfind(f"<{tag}>", 0, max(0, text.rfind(f"</{tag}>")))
    return text[start + len(tag) + 2 : text.find(f"</{tag}>", start)].strip() if start >= 0 else None


def gold_text(gold: object) -> str:
    """The gold answer as text. Of GSM8K's worked solutions this is the part behind the last `####`. A number has all
    its digits: 0.00005, not 5e-05."""
    if isinstance(gold, float) and math.isfinite(gold):
        gold = Decimal(repr(float(gold)))
    text = format(gold, "f") if isinstance(gold, Decimal) else str(gold)
    return text.rsplit("####", 1)[-1].strip()


def column_of(columns: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    """A data column by its configured name, or a part of a nested column: `conversations[2][value]`.

    Raises ValueError, which names the existing columns, or the value that lacks the part.
    """
    if name in columns:
        return columns[name]
    first, steps = name.partition("[")[0], _STEP.findall(name)
    if first not in columns or f"{first}{''.join(f'[{step}]' for step in steps)}" != name:
        raise ValueError(f"args.column: the data has no column {name!r}; it has {sorted(columns)}")
    return [_part(value, steps, name) for value in columns[first]]


_STEP = re.compile(r"\[([^\[\]]+)\]")


def _part(value: Any, steps: Sequence[str], name: str) -> Any:
    for step in steps:
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"args.column: there is no {step!r} of {name!r} in {str(value)[:80]!r}") from None
    return value


_NAME = re.compile(r"[A-Za-z_][\w.-]*")


def check_tag(tag: object) -> str:
    """Returns a tag name from a configuration. Raises ValueError unless it is a plain name (not `<answer>`)."""
    if not isinstance(tag, str) or not _NAME.fullmatch(tag):
        raise ValueError(f"args: a tag must be a plain name such as 'answer', got {tag!r}; leave out the brackets")
    return tag
