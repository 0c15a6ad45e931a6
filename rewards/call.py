"""One call of a reward function on a group: choose its arguments, call it, read what it returns. Plain functions."""

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

# Reward functions that were written for others than TRL, known by the names of their parameters.
#
# * verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, of one completion: a number, a
# dict
#   with `score`, or a tuple that begins with the number; and its graders, which call the text otherwise. In batches,
#   `compute_score(data_sources, solution_strs, ground_truths, extra_infos)`.
# * OpenRLHF's `reward_func(queries, prompts, labels)`: numbers, or a dict with `rewards`, `scores` and `extra_logs`.
# * Of one completion, `reward(completion, prompt, answer, **columns)`, with the same results.
# * ms-swift's ORM, which has TRL's convention with completions that are texts.
#
# They are given texts, whatever form prompt and completion have. Other numbers of a dict are metrics, as of
# `log_metric`.

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
    written for others. Raises WrongInput if it does not take one of `args`."""
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
        """By parameter, a value of each completion, less those in `whole`. Raises WrongInput if it wants what is not
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
            raise WrongInput(f"asks for {', '.join(missing)}, but {there}{gold}")
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
    """Raises what the function raised, if it did so on every completion, or the process has no memory or files left,
    which is no fault of one completion."""
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
    """What a function of a group returned, as it is read here."""
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
    """What it says of one completion."""
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


Status = Literal["ok", "nan", "timeout", "error"]
PREFILLED = "prefilled"  # the parameter of a function of the user's that wants to know of it
FACTORY = (
    "makes a function (a factory): call it in your file and name its result, for example reward = get_reward(...); "
    "then use: file.py:reward"
)
_OWN = ("prompt", "prompts", "completion", "completions", "completion_ids")  # never taken from the data's columns
# One loop for all calls of a process: a client or a semaphore of a module works in the loop that first used it alone.
_RUNNER = asyncio.Runner()


@dataclass(frozen=True)
class Group:
    """What is scored: lists of the same length, one entry per completion; columns already repeated. prefilled: the
    opening tag that the prompts end in, such as `<think>`, and which completions do not repeat; "": none.

    Raises ValueError if the lengths differ.
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
        """The completions of one problem: each text conversational where the prompt is a list of messages; prompt and
        columns of the problem repeated once per completion."""
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
    """The outcome of one call: its values (None where the function gave None, nan where it failed) and, unless the
    status is ok, what was wrong, in words. why: of completions that have 0 for another reason than a wrong answer, that
    reason. ms: that an answer took, without loading; 0 where there is none. awaited: whether the function is
    asynchronous; None where that did not show. told: by TRL's hooks. asked: variables that were looked for, and are
    kept from the process. spent: the process has run out of memory, files or threads, or soon will have."""

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
    """Calls `reward` on `group`. Whatever the function does becomes a Verdict, unless it kills its process."""
    return scores(reward, [group], args, built_in=built_in)[0]


def scores(
    reward: Reward, groups: Sequence[Group], args: Mapping[str, Any], *, built_in: bool, timeout_s: float | None = None
) -> list[Verdict]:
    """What `score` says of each group. Calls of an asynchronous function are under way at once, and those that take
    longer than `timeout_s` are cancelled (None: none is); RuntimeError where one of several stops the event loop."""
    begun = [_begun(reward, group, args, built_in=built_in) for group in groups]
    waiting = [one for one in begun if isinstance(one, _Begun)]
    ended = iter(_waited_for(waiting, timeout_s) if waiting else ())
    return [next(ended) if isinstance(one, _Begun) else one for one in begun]


def failed(status: Status, size: int, problem: str) -> Verdict:
    """A call that gave no value for any of the `size` completions."""
    return Verdict(status, [math.nan] * size, writable(problem))


@dataclass(frozen=True)
class _Begun:
    """A call of an asynchronous function, for a group of `size`, which began at `begin` of time.perf_counter."""

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
    except BaseException as error:  # sys.exit() in a reward function is its failure, not the worker's end
        return _ended(_raised(error, size), begin)


def _waited_for(begun: Sequence[_Begun], timeout_s: float | None) -> list[Verdict]:
    try:
        return _RUNNER.run(_ends(begun, timeout_s))
    except BaseException as error:  # sys.exit() in a task of its own, say, stops the loop
        if len(begun) > 1:
            raise RuntimeError(f"one of {len(begun)} calls stopped the event loop: {type(error).__name__}") from error
        return [_ended(_raised(error, one.size), one.begin, awaited=True) for one in begun]
    finally:  # what they leave behind would go on in the call of another function, and see that one's variables
        _RUNNER.run(_cancel_others())


async def _ends(begun: Sequence[_Begun], timeout_s: float | None) -> list[Verdict]:
    if len(begun) == 1:  # in this task, so that a function that cancels all others cancels nothing of ours
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
    """With what the call told, and how often it looked for what is kept from its process."""
    asked = limits.asked()
    for name, count in asked.items():
        log.metric(f"asked_for_{name}", count)
    return replace(verdict, told=log.told(), asked=tuple(sorted(asked)))


def _ended(verdict: Verdict, begin: float, awaited: bool | None = None) -> Verdict:
    return replace(verdict, ms=(time.perf_counter() - begin) * 1e3, awaited=awaited)


def _raised(error: BaseException, size: int) -> Verdict:
    # A sentence of our own is complete as it is.
    ours = isinstance(error, WrongInput)
    verdict = failed("error", size, said(error)[:LONGEST] if ours else described(error, caller=__file__))
    return replace(verdict, spent=limits.memory_spent(error))


def _arguments(reward: Reward, group: Group, args: Mapping[str, Any], log: Log, *, built_in: bool) -> dict[str, Any]:
    """The keyword arguments for `reward`, by its signature. Raises WrongInput if it wants what is not there."""
    parameters = inspect.signature(reward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    # A built-in's settings are its keyword-only parameters: a data column that happens to be called `tag` is none.
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
    """Whether it is a factory, such as TRL's get_soft_overlong_punishment: it says that it returns a function, and
    asks for nothing of a group."""
    returns = inspect.signature(reward).return_annotation
    return "Callable" in str(returns) and not names & {*_OWN}


def _tags(parameters: Iterable[inspect.Parameter], args: Mapping[str, Any]) -> list[Any]:
    """The tags that a built-in looks for."""
    found = [args.get(one.name, one.default) for one in parameters if one.name in ("tag", "tags")]
    return [tag for value in found for tag in (value if isinstance(value, list | tuple) else [value])]


def _named_columns(args: Mapping[str, Any], group: Group, names: set[str]) -> dict[str, Sequence[Any]]:
    """The columns that a built-in's args name (`column`, `setup_column`) although they are not passed on otherwise.
    Raises WrongInput if a parameter of the built-in, or the group itself, has the name of one."""
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
    """Its values, None if it is nothing that has them in order. Of an iterator, which may have no end, one more than
    there must be."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned  # numpy and torch
    if isinstance(values, list | tuple):
        return values
    if isinstance(values, str | bytes | bytearray | Mapping | Set) or not isinstance(values, Iterable):
        return None
    return list(values if isinstance(values, Sized) else islice(values, size + 1))


def _is_number(value: Any) -> bool:
    """Text is never a number, however it reads: it has no __float__."""
    return value is None or hasattr(value, "__float__")


def _number(value: Any) -> float:
    """`value` as a float that counts, or nan."""
    if not _is_number(value):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # a tensor of two elements; an int beyond float
        return math.nan
    return number if counts(number) else math.nan
