"""What a reward is, what it may ask for and tell beside its values, and the errors of this package.

A reward is a function (plain or `async def`) of a group of completions, in TRL's convention, so that functions
written for TRL or open-r1 work unchanged:

    def my_reward(prompts, completions, completion_ids, answer, **kwargs) -> list[float | None]

* It is called with keyword arguments only: `prompts`, `completions`, `completion_ids` (token ids of each completion)
  and one list per data column, each already repeated once per completion. All lists have the same length.
* A function without `**kwargs` receives only the parameters that it names; one with `**kwargs` receives every column.
  The columns `prompt`, `completion` and `completion_ids` of the data are not passed on, as in TRL, less a `prompt` or
  `completion` that an arg of a built-in names (`column: completion`).
* Where the model has a chat template a prompt is a list of messages, also where the data gives a text, and a completion
  is `[{"role": "assistant", "content": "..."}]`. Without one both are strings. `text_of` reads both.
* `args` of the configuration are passed on every call and win over a column of the same name.
* It returns one number per completion, as a list or anything else that has them in order (a tuple, an array, a
  generator), or None for one that it does not score. As in TRL, the other functions' sum
  then counts, so each task of a mixed data set can have a function of its own. A completion without any score is
  left out of training (status `none`); TRL gives it 0. NaN, infinity, a number beyond 1e30 or anything else that is
  not a number is a failure: the sample gets status `nan` and no reward.
* A function with the parameters of verl, OpenRLHF or ms-swift, or one of a single completion, is used as it is
  (rewards.call).
* Calls of an `async def` for several groups are under way at once, on one event loop.

Of TRL's extras, `trainer_state` has `global_step`, `max_steps` and `epoch`; what `log_metric(name, value)` is given is
`log/<name>` in metrics.jsonl, the mean over groups; what `log_extra(column, values)` is given stands beside each
completion in the rollouts. `environments` is not provided: a reward function runs in its own process,
far from them. One that demands it is refused before training starts.
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

JUDGE = "judge"  # the `use` of a language model that is asked
ADAPTER = "adapter:"  # how the `use` of a reward model on the learner's base begins
LARGEST = 1e30  # of a reward: weighted sums of them, too, are held in float32, which ends at 3.4e38
TRL_EXTRAS = ("environments",)


class Zeroed(list[float]):
    """What a reward function of ours returns: its values, and why a completion has nan, or 0 for another reason than a
    wrong answer (it was late, say, or ended its process), by its place in the group."""

    def __init__(self, values: Sequence[float], why: Mapping[int, str]) -> None:
        super().__init__(values)
        self.why = dict(why)


def writable(text: str) -> str:
    """The text with each half of a surrogate pair, which no file or Arrow column takes, as Python writes it."""
    return text.encode(errors="backslashreplace").decode()


def said(error: BaseException) -> str:
    """The text of an exception that is not ours, in one line, whatever its __str__ does."""
    try:
        return writable(" ".join(str(error).split()))
    except BaseException as second:
        return f"its text cannot be read, since its __str__ raises {type(second).__name__}"


def counts(number: float) -> bool:
    """Whether it can be a reward or a part of one: finite, and of at most LARGEST."""
    return abs(number) <= LARGEST


# What TRL gives its reward functions beside the data: `log_metric` and `log_extra`, by which they tell more than their
# values, and `trainer_state`, which tells them how far the run is.

NAMES = ("trainer_state", "log_extra", "log_metric")
MOST = 64  # metrics of a call, and columns
LONGEST_NAME, LONGEST_TEXT = 100, 2000


@dataclass(frozen=True, slots=True)
class Progress:
    """Where the run is as a group is scored: updates of its generator's newest policy, of how many, and the epoch."""

    step: int = 0
    steps: int = 0
    epoch: int = 0


BEGIN = Progress()


class TrainerState:
    """Of transformers' TrainerState what a run of gleaner has."""

    def __init__(self, progress: Progress) -> None:
        self.global_step, self.max_steps, self.epoch = progress.step, progress.steps, float(progress.epoch)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state.{name}: here it has global_step, max_steps and epoch")


@dataclass(frozen=True, slots=True)
class Told:
    """What one call told. metrics: the mean of each metric's values. extras: a text for each completion, by column."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Sequence[str]] = field(default_factory=dict)


class Log:
    """Takes what one call of a reward function tells, for `size` completions."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._metrics: dict[str, list[float]] = {}
        self._extras: dict[str, list[str]] = {}

    def metric(self, name: str, value: float) -> None:
        """`log_metric`. Values that are not finite are left out. Raises ValueError."""
        try:
            number = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"log_metric: {name!s:.40} must be a number, got {type(value).__name__}") from error
        if math.isfinite(number):
            _of(self._metrics, name, "log_metric").append(number)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """`log_extra`. Raises ValueError."""
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
    """What several functions told of a group: (name, number or None, text or None) for each of its completions. Of a
    metric that several of them tell, their mean."""
    metrics: dict[str, list[float]] = {}
    texts: dict[str, Sequence[str]] = {}
    for one in told:
        for name, value in one.metrics.items():
            metrics.setdefault(name, []).append(value)
        texts |= one.extras
    same = [(name, math.fsum(values) / len(values), None) for name, values in metrics.items()]
    return [[*same, *((name, None, column[i]) for name, column in texts.items())] for i in range(size)]


# What several reward functions need to read of a completion or of a gold answer.


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a completion, plain or conversational.

    Of a conversation only the assistant's messages count (tool output is not the policy's work); they are joined by
    newlines. Content given in parts contributes its text parts.
    """
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return "\n".join(_content(message.get("content")) for message in said)


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """The text of a prompt: of a conversation that of all its messages, without the marks of a chat template."""
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
    """The opening tag that a prompt's text ends in, with the white space behind it; "" where there is none. A template
    that prefills <think> writes it there, and completions begin inside of it."""
    found = _OPENING.search(prompt)
    return "" if found is None else found[0]


def tag_of(opening: str) -> str:
    """The name in what `opening_at_end` found."""
    return opening.strip()[1:-1]


def behind(opening: str, completion: str | Sequence[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
    """A completion with the opening tag of its prompt in front, of a conversation before its first answer."""
    if isinstance(completion, str):
        return opening + completion
    said = list(completion)
    first = next((i for i, message in enumerate(said) if message.get("role", "assistant") == "assistant"), None)
    if first is not None:
        said[first] = {**said[first], "content": opening + _content(said[first].get("content"))}
    return said


def tagged(text: str, tag: str) -> str | None:
    """The stripped text inside the last closed `<tag>...</tag>`, or None if there is none. It ends at its first
    `</tag>`, if more of them follow."""
    start = text.rfind(f"<{tag}>", 0, max(0, text.rfind(f"</{tag}>")))
    return text[start + len(tag) + 2 : text.find(f"</{tag}>", start)].strip() if start >= 0 else None


def gold_text(gold: object) -> str:
    """The gold answer as text; of GSM8K's worked solutions what follows the last `####`. Of a number all its digits:
    0.00005, not 5e-05."""
    if isinstance(gold, float) and math.isfinite(gold):
        gold = Decimal(repr(float(gold)))
    text = format(gold, "f") if isinstance(gold, Decimal) else str(gold)
    return text.rsplit("####", 1)[-1].strip()


def column_of(columns: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    """A data column by its configured name, or a part of a nested one: `conversations[2][value]`.

    Raises ValueError naming the columns that exist, or what there is in place of a part.
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
    """A tag name as it may stand in a configuration. Raises ValueError for anything else, such as `<answer>`."""
    if not isinstance(tag, str) or not _NAME.fullmatch(tag):
        raise ValueError(f"args: a tag must be a plain name such as 'answer', got {tag!r}; leave out the brackets")
    return tag
