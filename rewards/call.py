"""Calls a reward function on groups, in the process of the caller: chooses its arguments by its signature, calls it,
and turns what it returns or raises into a Verdict. The first part adapts functions that were written for verl, OpenRLHF
or ms-swift to the convention of rewards.base.
"""

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from cluster.actor import within
from cluster.errors import WrongInput
from rewards import limits
from rewards.base import (
    BEGIN,
    NAMES,
    TRL_EXTRAS,
    Log,
    Progress,
    Reward,
    Told,
    TrainerState,
    Zeroed,
    behind,
    counts,
    prompt_text,
    said,
    tag_of,
    text_of,
    writable,
)
from rewards.limits import LONGEST, described

# Reward functions of other libraries are recognised by the names of their parameters:
#
# * verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)` scores one completion and returns a
#   number, a dict with `score`, or a tuple that begins with the number. Its graders have other names for the text
#   (_OF_ONE). In batches it is `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`.
# * OpenRLHF's `reward_func(queries, prompts, labels)` returns numbers, or a dict with `rewards`, `scores` and
#   `extra_logs`.
# * `reward(completion, prompt, answer, **columns)` scores one completion and returns what verl's function may return.
# * ms-swift's ORM has TRL's parameters, but its completions are texts.
#
# All of them get prompts and completions as texts, also where these are lists of messages. Other numbers in a returned
# dict are logged as metrics, as with `log_metric`.

GOLD = ("answer", "ground_truth", "solution", "label", "target")  # columns of the right answer; the first found counts
_GOLDEN = {"ground_truth", "ground_truths", "label", "labels"}  # parameters that get the right answer
_SINGULAR = {name: name[:-1] for name in ("data_sources", "ground_truths", "extra_infos", "labels")}
_OF_ONE = ("completion", "solution_str", "model_output", "predict_str")  # parameters for the text of one completion
_OPENRLHF = {"queries", "prompts", "labels"}
_ORM = {"ORM", "AsyncORM"}

Columns = Mapping[str, Sequence[Any]]
Metric = Callable[[str, float], None]


def taken(function: Reward, args: Mapping[str, Any]) -> tuple[Reward, Mapping[str, Any]]:
    """Returns the function in the convention of rewards.base, and the args that its caller must still pass. A function
    that has that convention already is returned as it is. Raises WrongInput if a function of another library does not
    take one of `args`."""
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
        raise WrongInput(f"args: unknown {', '.join(unknown)}; this reward takes {', '.join(sorted(names))}")
    kind = _OfOne if each else _OfGroup
    return kind(function, args, names, required, open_ended and "completion" in names), {}


def _of_texts(function: Reward) -> Reward:
    def called(completions: Sequence[Any], **others: Any) -> Any:
        return function(completions=[text_of(one) for one in completions], **others)

    called.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return called


@dataclass(frozen=True)
class _Theirs:
    """A function of another library, callable with the arguments of rewards.base.

    args: settings that are passed unchanged in each call. names: its parameters. required: those without a default.
    all_columns: whether it also gets the data columns that it does not name.
    """

    function: Callable[..., Any]
    args: Mapping[str, Any]
    names: Collection[str]
    required: Sequence[str]
    all_columns: bool

    def given(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any], columns: Columns,
        whole: Mapping[str, Any],
    ) -> dict[str, Sequence[Any]]:  # fmt: skip
        """For each parameter that is not in `whole` a list with one value per completion. Raises WrongInput if there
        is nothing for a required parameter."""
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
            raise WrongInput(f"asks for {', '.join(missing)}, but {there}{gold}")
        return {name: values for name, values in found.items() if values is not None}


class _OfOne(_Theirs):
    """A function that is called once for each completion. A completion on which it raises, or is late, gets nan with
    the reason."""

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
        """Calls the function for one completion. Returns what it returned, or the exception that it raised."""
        try:
            with limits.sharing(last):
                return self.function(**row)
        except limits.Late:
            return WrongInput("took more than its part of the time that its group has, timeout_s")
        except (Exception, SystemExit) as error:
            return error

    async def _awaited(self, outcomes: Sequence[Any], log_metric: Metric) -> Zeroed:
        async def end(outcome: Any) -> Any:
            return await outcome if isinstance(outcome, Awaitable) else outcome

        return _read(await asyncio.gather(*map(end, outcomes), return_exceptions=True), log_metric)


def _read(outcomes: Sequence[Any], log_metric: Metric) -> Zeroed:
    """Makes the values of a group from the outcomes of its completions. Raises the function's exception if it raised on
    every completion, or if the process has no memory or files left, which no single completion can cause."""
    values: list[Any] = []
    why: dict[int, str] = {}
    for i, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException):
            if limits.memory_spent(outcome):
                raise outcome
            why[i] = str(outcome) if isinstance(outcome, WrongInput) else described(outcome, caller=__file__)
            values.append(math.nan)
        else:
            values.append(_score(outcome, log_metric))
    if len(why) == len(outcomes):
        raise outcomes[0]
    return Zeroed(values, why)


class _OfGroup(_Theirs):
    """A function that is called once for a group."""

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
    """The numbers in what a function of a group returned; logs the other numbers of a dict."""
    if not isinstance(found, Mapping):
        return [_score(one, log_metric) for one in found] if isinstance(found, list | tuple) else found
    if "rewards" not in found:
        raise WrongInput(f"returned a dict without rewards, must have it; it has {', '.join(map(str, found))}")
    others = {"scores": found.get("scores"), **(found.get("extra_logs") or {})}
    for name, value in others.items():
        values = value.tolist() if hasattr(value, "tolist") else value  # numpy and torch
        for one in values if isinstance(values, list | tuple) else [values]:
            _log(name, one, log_metric)
    return found["rewards"]


def _score(found: Any, log_metric: Metric) -> Any:
    """The number in what a function returned for one completion; logs the other numbers of a dict."""
    if isinstance(found, list | tuple) and found:
        return found[0]
    if not isinstance(found, Mapping):
        return found
    if "score" not in found:
        raise WrongInput(f"returned a dict without score, must have it; it has {', '.join(map(str, found))}")
    for name, value in found.items():
        if name != "score":
            _log(name, value, log_metric)
    return found["score"]


def _log(name: str, value: Any, log_metric: Metric) -> None:
    """Logs a metric if the value is a number. Text has no __float__."""
    if hasattr(value, "__float__"):
        log_metric(name, value)


def _values(name: str, texts: Columns, columns: Columns, size: int) -> Sequence[Any] | None:
    """The values, one per completion, for a parameter of that name; None if there are none."""
    if name in texts:
        return texts[name]
    single = _SINGULAR.get(name, name)
    if (column := next((one for one in (name, single) if one in columns), None)) is not None:
        return columns[column]
    if name in _GOLDEN:
        return _gold(columns)
    return [{} for _ in range(size)] if single == "extra_info" else None


def _gold(columns: Columns) -> Sequence[Any] | None:
    kept = columns.get("reward_model", ())  # a column of verl's data sets
    if kept and all(isinstance(one, Mapping) and "ground_truth" in one for one in kept):
        return [one["ground_truth"] for one in kept]
    return next((columns[name] for name in GOLD if name in columns), None)


Status = Literal["ok", "nan", "timeout", "error"]
PREFILLED = "prefilled"  # the parameter by which a user's function asks for Group.prefilled
FACTORY = (
    "makes a function (a factory): call it in your file and name its result, for example reward = get_reward(...); "
    "then use: file.py:reward"
)
_OWN = ("prompt", "prompts", "completion", "completions", "completion_ids")  # never taken from the data's columns
# One event loop for all calls of a process, since a client or a semaphore of a module works only in the loop that first
# used it.
_RUNNER = asyncio.Runner()


@dataclass(frozen=True)
class Group:
    """The completions of one problem, as reward functions get them: lists with one entry per completion.

    prompts, completions: texts, or lists of messages. completion_ids: token ids. columns: the data columns, each value
    repeated once per completion. prefilled: the opening tag at the end of the prompts, such as `<think>`, which the
    completions do not repeat; "" if there is none. progress: how far the run is. Raises ValueError if lengths differ.
    """

    prompts: Sequence[Any]
    completions: Sequence[Any]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    prefilled: str = ""
    progress: Progress = BEGIN

    def __post_init__(self) -> None:
        size = len(self.completions)
        given = {"prompts": self.prompts, "completion_ids": self.completion_ids, **self.columns}
        if uneven := {name: len(values) for name, values in given.items() if len(values) != size}:
            raise ValueError(f"group: each list must have one entry per completion ({size}), got lengths {uneven}")

    @classmethod
    def of(
        cls, prompt: Any, texts: Sequence[str], completion_ids: Sequence[Sequence[int]], columns: Mapping[str, Any],
        prefilled: str = "", progress: Progress = BEGIN,
    ) -> "Group":  # fmt: skip
        """Makes the group of one problem. Prompt and columns are repeated once per completion. Where the prompt is a
        list of messages, each text becomes an assistant's message."""
        chatty = not isinstance(prompt, str)
        return cls(
            [list(prompt) if chatty else prompt] * len(texts),
            [[{"role": "assistant", "content": text}] for text in texts] if chatty else list(texts),
            completion_ids,
            {key: [value] * len(texts) for key, value in columns.items()},
            prefilled,
            progress,
        )


@dataclass(frozen=True)
class Verdict:
    """The outcome of one call of a reward function on a group.

    values: one per completion, None where the function gave None, nan where it failed. problem: what was wrong, if the
    status is not ok. why: by index of a completion, the reason for a 0 that is not a wrong answer. ms: milliseconds of
    the call without loading; 0 if it gave no answer. awaited: whether the function is asynchronous; None if the call
    did not show it. told: what the function passed to TRL's hooks. asked: withheld environment variables that it looked
    for. spent: the process has run out of memory, files or threads, or soon will.
    """

    status: Status
    values: list[float | None]
    problem: str = ""
    why: Mapping[int, str] = field(default_factory=dict)
    ms: float = field(default=0.0, compare=False)
    awaited: bool | None = field(default=None, compare=False)
    told: Told = field(default_factory=Told)
    asked: tuple[str, ...] = ()
    spent: bool = field(default=False, compare=False)


def score(reward: Reward, group: Group, args: Mapping[str, Any], *, built_in: bool) -> Verdict:
    """Calls `reward` on `group`. Everything that the function does becomes a Verdict, unless it ends its process.
    built_in: whether it is one of rewards.loader.BUILT_INS, whose keyword-only parameters are settings."""
    return scores(reward, [group], args, built_in=built_in)[0]


def scores(
    reward: Reward, groups: Sequence[Group], args: Mapping[str, Any], *, built_in: bool, timeout_s: float | None = None
) -> list[Verdict]:
    """The verdict of `score` on each group. Calls of an asynchronous function run at the same time, and a call that
    takes longer than `timeout_s` is cancelled (None: no limit). Raises RuntimeError if one of several calls stops the
    event loop."""
    begun = [_begun(reward, group, args, built_in=built_in) for group in groups]
    waiting = [one for one in begun if isinstance(one, _Begun)]
    ended = iter(_waited_for(waiting, timeout_s) if waiting else ())
    return [next(ended) if isinstance(one, _Begun) else one for one in begun]


def failed(status: Status, size: int, problem: str) -> Verdict:
    """The verdict on a call that gave no value for any of the `size` completions."""
    return Verdict(status, [math.nan] * size, writable(problem))


@dataclass(frozen=True)
class _Begun:
    """A running call of an asynchronous function on a group of `size` completions. begin: time.perf_counter at its
    start."""

    answer: Awaitable[Any]
    size: int
    begin: float
    log: Log


def _begun(reward: Reward, group: Group, args: Mapping[str, Any], *, built_in: bool) -> Verdict | _Begun:
    size, begin = len(group.completions), time.perf_counter()
    log = Log(size)
    try:
        if not built_in:
            reward, args = taken(reward, args)
        returned = reward(**_arguments(reward, group, args, log, built_in=built_in))
        if isinstance(returned, Awaitable):
            return _Begun(returned, size, begin, log)
        return _ended(_told(_verdict_of(returned, size), log), begin, awaited=False)
    except BaseException as error:  # sys.exit() in a reward function is a failure of it and must not end the worker
        return _ended(_raised(error, size), begin)


def _waited_for(begun: Sequence[_Begun], timeout_s: float | None) -> list[Verdict]:
    try:
        return _RUNNER.run(_ends(begun, timeout_s))
    except BaseException as error:  # for example sys.exit() in a task that the function created stops the loop
        if len(begun) > 1:
            raise RuntimeError(f"one of {len(begun)} calls stopped the event loop: {type(error).__name__}") from error
        return [_ended(_raised(error, one.size), one.begin, awaited=True) for one in begun]
    finally:  # a task left behind would run during the call of another function, with that function's variables
        _RUNNER.run(_cancel_others())


async def _ends(begun: Sequence[_Begun], timeout_s: float | None) -> list[Verdict]:
    if len(begun) == 1:  # awaited in this task, so that a function that cancels all other tasks does not cancel it
        return [await _end(begun[0], timeout_s)]
    return await asyncio.gather(*(_end(one, timeout_s) for one in begun))


async def _cancel_others() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _end(begun: _Begun, timeout_s: float | None) -> Verdict:
    try:
        async with within(timeout_s) as limit:
            verdict = _verdict_of(await begun.answer, begun.size)
            return _ended(_told(verdict, begun.log), begun.begin, awaited=True)
    except BaseException as error:
        if limit.expired():
            return failed("timeout", begun.size, f"no answer within {timeout_s:g} s, so it was cancelled")
        return _ended(_raised(error, begun.size), begun.begin, awaited=True)


def _told(verdict: Verdict, log: Log) -> Verdict:
    """Adds to the verdict what the function logged, and which withheld variables it looked for, how often."""
    asked = limits.asked()
    for name, count in asked.items():
        log.metric(f"asked_for_{name}", count)
    return replace(verdict, told=log.told(), asked=tuple(sorted(asked)))


def _ended(verdict: Verdict, begin: float, awaited: bool | None = None) -> Verdict:
    return replace(verdict, ms=(time.perf_counter() - begin) * 1e3, awaited=awaited)


def _raised(error: BaseException, size: int) -> Verdict:
    # A WrongInput is a complete sentence and needs no place in the code.
    ours = isinstance(error, WrongInput)
    verdict = failed("error", size, said(error)[:LONGEST] if ours else described(error, caller=__file__))
    return replace(verdict, spent=limits.memory_spent(error))


def _arguments(reward: Reward, group: Group, args: Mapping[str, Any], log: Log, *, built_in: bool) -> dict[str, Any]:
    """The keyword arguments for `reward`, chosen by its signature. Raises WrongInput for an arg that it does not take,
    and for a required parameter that nothing provides."""
    parameters = inspect.signature(reward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    # The settings of a built-in are its keyword-only parameters, so a data column named `tag` cannot set one.
    settings = {p.name for p in parameters if built_in and p.kind is p.KEYWORD_ONLY}
    allowed = settings if built_in else names
    unknown = sorted(set(args) - allowed)
    if unknown and (built_in or not open_ended):
        taken = ", ".join(sorted(allowed - {*_OWN})) or "none"
        raise WrongInput(f"args: unknown {', '.join(unknown)}; this reward takes {taken}")
    given: dict[str, Any] = {n: v for n, v in group.columns.items() if n not in _OWN and n not in settings}
    if built_in:
        given |= _named_columns(args, group, names)
    given |= {"prompts": group.prompts, "completions": group.completions, "completion_ids": group.completion_ids}
    if built_in and group.prefilled and tag_of(group.prefilled) in _tags(parameters, args):
        given["completions"] = [behind(group.prefilled, completion) for completion in group.completions]
    elif not built_in and PREFILLED in names and PREFILLED not in group.columns:
        given[PREFILLED] = [group.prefilled] * len(group.completions)
    if not built_in:
        hooks = dict(zip(NAMES, (TrainerState(group.progress), log.extra, log.metric), strict=True))
        given = {name: hook for name, hook in hooks.items() if name in names or open_ended} | given
    given |= args
    required = [p.name for p in parameters if p.name in names and p.default is p.empty]
    missing = [name for name in required if name not in given]
    if missing:
        raise WrongInput(FACTORY if _makes_function(reward, names) else _missing(missing, group, settings))
    return given if open_ended else {n: v for n, v in given.items() if n in names}


def _makes_function(reward: Reward, names: set[str]) -> bool:
    """Whether `reward` is a factory, such as TRL's get_soft_overlong_punishment: its annotation says that it returns a
    function, and it has none of the parameters for a group."""
    returns = inspect.signature(reward).return_annotation
    return "Callable" in str(returns) and not names & {*_OWN}


def _tags(parameters: Iterable[inspect.Parameter], args: Mapping[str, Any]) -> list[Any]:
    """The tag names that a built-in searches completions for, by its parameters `tag` and `tags`."""
    found = [args.get(one.name, one.default) for one in parameters if one.name in ("tag", "tags")]
    return [tag for value in found for tag in (value if isinstance(value, list | tuple) else [value])]


def _named_columns(args: Mapping[str, Any], group: Group, names: set[str]) -> dict[str, Sequence[Any]]:
    """The data columns that a built-in's args name (`column`, `setup_column`), which it gets although it has no
    parameter of that name. Raises WrongInput if such a column has the name of a parameter or of a part of the
    group."""
    found: dict[str, Sequence[Any]] = {}
    for arg, value in args.items():
        column = value.partition("[")[0] if arg.endswith("column") and isinstance(value, str) else ""
        if column not in group.columns:
            continue
        if column in names or column in ("prompts", "completion_ids"):
            raise WrongInput(f"args.{arg}: cannot be {column!r}, which is no column to this reward; rename the column")
        found[column] = group.columns[column]
    return found


def _missing(names: Sequence[str], group: Group, settings: set[str]) -> str:
    listed = ", ".join(names)
    if set(names) <= settings:
        return f"args: must give {listed}"
    if extras := [name for name in names if name in TRL_EXTRAS]:
        listed = ", ".join(extras)
        return f"asks for {listed}, which only TRL's trainer provides; give the parameter a default or drop it"
    return f"asks for {listed}, but the data has the columns {', '.join(sorted(group.columns)) or 'none'}"


def _verdict_of(returned: Any, size: int) -> Verdict:
    if callable(returned):
        return failed("error", size, FACTORY)
    values = _listed(returned, size)
    if values is None:
        problem = f"returned {type(returned).__name__}, must return a list with one number per completion"
        return failed("error", size, problem)
    if len(values) != size:
        many = f"more than {size}" if len(values) > size and not isinstance(returned, Sized) else len(values)
        return failed("error", size, f"returned {many} values for {size} completions, must return one for each")
    numbers = [None if value is None else _number(value) for value in values]
    if (odd := next((i for i, value in enumerate(values) if not _is_number(value)), None)) is not None:
        kind, shown = type(values[odd]).__name__, repr(values[odd])[:LONGEST]
        return Verdict("error", numbers, f"returned {kind} for sample {odd}, must return numbers or None: {shown}")
    bad = [i for i, number in enumerate(numbers) if number is not None and math.isnan(number)]
    if not bad:
        return Verdict("ok", numbers, why=returned.why if isinstance(returned, Zeroed) else {})
    why = returned.why.get(bad[0]) if isinstance(returned, Zeroed) else None
    first = f"sample {bad[0]}: {why or repr(values[bad[0]])}"[:LONGEST]
    return Verdict("nan", numbers, f"{len(bad)} of {size} values are no finite numbers up to 1e30, first {first}")


def _listed(returned: Any, size: int) -> Sequence[Any] | None:
    """The returned values as a sequence; None if `returned` is not an ordered collection. Of an iterator, which may be
    endless, at most size + 1 values are read."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned  # numpy and torch
    if isinstance(values, list | tuple):
        return values
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or not isinstance(values, Iterable):
        return None
    return list(values if isinstance(values, Sized) else islice(values, size + 1))


def _is_number(value: Any) -> bool:
    """Whether the value is a number or None. Text such as "1.0" is not: it has no __float__."""
    return value is None or hasattr(value, "__float__")


def _number(value: Any) -> float:
    """`value` as a float that is allowed as a reward (rewards.base.counts), or nan."""
    if not _is_number(value):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # a tensor of two elements; an int beyond float
        return math.nan
    return number if counts(number) else math.nan
