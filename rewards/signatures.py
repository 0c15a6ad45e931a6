"""Reward functions that were written for others than TRL, known by the names of their parameters.

* verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, of one completion: a number, a dict
  with `score`, or a tuple that begins with the number; and its graders, which call the text otherwise. In batches,
  `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`.
* OpenRLHF's `reward_func(queries, prompts, labels)`: numbers, or a dict with `rewards`, `scores` and `extra_logs`.
* Of one completion, `reward(completion, prompt, answer, **columns)`, with the same results.
* ms-swift's ORM, which has TRL's convention with completions that are texts.

They are given texts, whatever form prompt and completion have. Other numbers of a dict are metrics, as of `log_metric`.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rewards import deadline, memory
from rewards.base import Reward, RewardError, Zeroed
from rewards.described import described
from rewards.logged import NAMES
from rewards.text import prompt_text, text_of

GOLD = ("answer", "ground_truth", "solution", "label", "target")  # columns that hold a right answer, the first counts
_GOLDEN = {"ground_truth", "ground_truths", "label", "labels"}  # parameters that are given one
_SINGULAR = {name: name[:-1] for name in ("data_sources", "ground_truths", "extra_infos", "labels")}
_OF_ONE = ("completion", "solution_str", "model_output", "predict_str")  # parameters for the text of one completion
_OPENRLHF = {"queries", "prompts", "labels"}
_ORM = {"ORM", "AsyncORM"}

Columns = Mapping[str, Sequence[Any]]
Metric = Callable[[str, float], None]


def taken(function: Reward, args: Mapping[str, Any]) -> tuple[Reward, Mapping[str, Any]]:
    """The function in the convention of rewards.base, with the args that it is still to be given: itself, unless it was
    written for others. Raises RewardError if it does not take one of `args`."""
    parameters = inspect.signature(function).parameters.values()
    names = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if "completions" in names:
        of_swift = _ORM & {one.__name__ for one in type(function).__mro__}
        return (_of_texts(function) if of_swift else function), args
    each = not names.isdisjoint(_OF_ONE)
    if not each and "solution_strs" not in names and not names >= _OPENRLHF:
        return function, args
    required = [one.name for one in parameters if one.name in names and one.default is one.empty]
    open_ended = any(one.kind is one.VAR_KEYWORD for one in parameters)
    if not open_ended and (unknown := sorted(set(args) - names)):
        raise RewardError(f"args: unknown {', '.join(unknown)}; this reward takes {', '.join(sorted(names))}")
    kind = _OfOne if each else _OfGroup
    return kind(function, args, names, required, open_ended and "completion" in names), {}


def _of_texts(function: Reward) -> Reward:
    def called(completions: Sequence[Any], **others: Any) -> Any:
        return function(completions=[text_of(one) for one in completions], **others)

    called.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return called


@dataclass(frozen=True)
class _Theirs:
    """args: as they are, in each call. all_columns: it is given those, too, that it does not name."""

    function: Callable[..., Any]
    args: Mapping[str, Any]
    names: Collection[str]
    required: Sequence[str]
    all_columns: bool

    def given(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], columns: Columns,
        whole: Mapping[str, Any],
    ) -> dict[str, Sequence[Any]]:  # fmt: skip
        """By parameter, a value of each completion, less those in `whole`. Raises RewardError if it wants what is not
        there."""
        answers, asked = [text_of(one) for one in completions], [prompt_text(one) for one in prompts]
        texts: Columns = {
            **dict.fromkeys((*_OF_ONE, "solution_strs"), answers),
            **dict.fromkeys(("prompt", "prompts"), asked),
            "completion_ids": completion_ids,
            "queries": [before + after for before, after in zip(asked, answers, strict=True)],
        }
        wanted = self.names | columns.keys() if self.all_columns else self.names
        found = {name: _values(name, texts, columns, len(answers)) for name in wanted if name not in whole}
        for name in found.keys() & {"data_source", "data_sources"} & {*self.required}:
            found[name] = found[name] or [""] * len(answers)
        if missing := [name for name in self.required if name in found and found[name] is None]:
            there = f"the data has the columns {', '.join(sorted(columns)) or 'none'}"
            gold = f"; a right answer is looked for in {', '.join(GOLD)}" if {*missing} & _GOLDEN else ""
            raise RewardError(f"asks for {', '.join(missing)}, but {there}{gold}")
        return {name: values for name, values in found.items() if values is not None}


class _OfOne(_Theirs):
    """Called for each completion. One that it raises on, or is late on, has nan, with the reason."""

    def __call__(
        self, /, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], log_metric: Metric,
        **columns: Any,
    ) -> Zeroed | Awaitable[Zeroed]:  # fmt: skip
        hooks = {"log_metric": log_metric, **{name: columns.pop(name) for name in NAMES if name in columns}}
        whole = {name: hook for name, hook in hooks.items() if name in self.names} | dict(self.args)
        given = self.given(prompts, completions, completion_ids, columns, whole)
        size = len(completions)
        rows = [{name: values[i] for name, values in given.items()} | whole for i in range(size)]
        outcomes = [self._outcome(row, last=i == size - 1) for i, row in enumerate(rows)]
        if any(isinstance(one, Awaitable) for one in outcomes):
            return self._awaited(outcomes, log_metric)
        return _read(outcomes, log_metric)

    def _outcome(self, row: Mapping[str, Any], last: bool) -> Any:
        """What it returns, or the exception."""
        try:
            with deadline.sharing(last):
                return self.function(**row)
        except deadline.Late:
            return RewardError("took more than its part of the time that its group has, timeout_s")
        except (Exception, SystemExit) as error:
            return error

    async def _awaited(self, outcomes: Sequence[Any], log_metric: Metric) -> Zeroed:
        async def end(outcome: Any) -> Any:
            return await outcome if isinstance(outcome, Awaitable) else outcome

        return _read(await asyncio.gather(*map(end, outcomes), return_exceptions=True), log_metric)


def _read(outcomes: Sequence[Any], log_metric: Metric) -> Zeroed:
    """Raises what the function raised, if it did so on every completion, or the process has no memory or files left,
    which is no fault of one completion."""
    values: list[Any] = []
    why: dict[int, str] = {}
    for i, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            if memory.spent(outcome):
                raise outcome
            why[i] = str(outcome) if isinstance(outcome, RewardError) else described(outcome, caller=__file__)
            values.append(math.nan)
        else:
            values.append(_score(outcome, log_metric))
    if len(why) == len(outcomes):
        raise outcomes[0]
    return Zeroed(values, why)


class _OfGroup(_Theirs):
    """Called for a group at once."""

    def __call__(
        self, /, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], log_metric: Metric,
        **columns: Any,
    ) -> Any:  # fmt: skip
        given = self.given(prompts, completions, completion_ids, columns, self.args)
        found = self.function(**given, **self.args)
        return self._awaited(found, log_metric) if isinstance(found, Awaitable) else _numbers(found, log_metric)

    async def _awaited(self, found: Awaitable[Any], log_metric: Metric) -> Any:
        return _numbers(await found, log_metric)


def _numbers(found: Any, log_metric: Metric) -> Any:
    """What a function of a group returned, as rewards.call reads it."""
    if not isinstance(found, Mapping):
        return [_score(one, log_metric) for one in found] if isinstance(found, list | tuple) else found
    if "rewards" not in found:
        raise RewardError(f"returned a dict without rewards, must have it; it has {', '.join(map(str, found))}")
    others = {"scores": found.get("scores"), **(found.get("extra_logs") or {})}
    for name, value in others.items():
        values = value.tolist() if hasattr(value, "tolist") else value  # numpy and torch
        for one in values if isinstance(values, list | tuple) else [values]:
            _log(name, one, log_metric)
    return found["rewards"]


def _score(found: Any, log_metric: Metric) -> Any:
    """What it says of one completion."""
    if isinstance(found, list | tuple) and found:
        return found[0]
    if not isinstance(found, Mapping):
        return found
    if "score" not in found:
        raise RewardError(f"returned a dict without score, must have it; it has {', '.join(map(str, found))}")
    for name, value in found.items():
        if name != "score":
            _log(name, value, log_metric)
    return found["score"]


def _log(name: str, value: Any, log_metric: Metric) -> None:
    """Other things than numbers are no metrics. Text has no __float__."""
    if hasattr(value, "__float__"):
        log_metric(name, value)


def _values(name: str, texts: Columns, columns: Columns, size: int) -> Sequence[Any] | None:
    """Of each completion what a parameter of that name is given; None where there is nothing."""
    if name in texts:
        return texts[name]
    single = _SINGULAR.get(name, name)
    if (column := next((one for one in (name, single) if one in columns), None)) is not None:
        return columns[column]
    if name in _GOLDEN:
        return _gold(columns)
    return [{} for _ in range(size)] if single == "extra_info" else None


def _gold(columns: Columns) -> Sequence[Any] | None:
    kept = columns.get("reward_model", ())  # of verl's rows
    if kept and all(isinstance(one, Mapping) and "ground_truth" in one for one in kept):
        return [one["ground_truth"] for one in kept]
    return next((columns[name] for name in GOLD if name in columns), None)
