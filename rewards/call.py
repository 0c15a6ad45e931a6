"""One call of a reward function on a group: choose its arguments, call it, read what it returns. Plain functions."""

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from cluster.actor import within
from rewards import environment, memory, signatures
from rewards.base import TRL_EXTRAS, Reward, RewardError, Zeroed, counts, said, writable
from rewards.described import LONGEST, described
from rewards.logged import BEGIN, NAMES, Log, Progress, Told, TrainerState
from rewards.text import behind, tag_of

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
            reward, args = signatures.taken(reward, args)
        returned = reward(**_arguments(reward, group, args, log, built_in=built_in))
        if isinstance(returned, Awaitable):
            return _Begun(returned, size, begin, log)
        return _ended(_told(_read(returned, size), log), begin, awaited=False)
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
            verdict = _read(await begun.answer, begun.size)
            return _ended(_told(verdict, begun.log), begun.begin, awaited=True)
    except BaseException as error:
        if limit.expired():
            return failed("timeout", begun.size, f"no answer within {timeout_s:g} s, so it was cancelled")
        return _ended(_raised(error, begun.size), begun.begin, awaited=True)


def _told(verdict: Verdict, log: Log) -> Verdict:
    """With what the call told, and how often it looked for what is kept from its process."""
    asked = environment.asked()
    for name, count in asked.items():
        log.metric(f"asked_for_{name}", count)
    return replace(verdict, told=log.told(), asked=tuple(sorted(asked)))


def _ended(verdict: Verdict, begin: float, awaited: bool | None = None) -> Verdict:
    return replace(verdict, ms=(time.perf_counter() - begin) * 1e3, awaited=awaited)


def _raised(error: BaseException, size: int) -> Verdict:
    # A sentence of our own is complete as it is.
    ours = isinstance(error, RewardError)
    verdict = failed("error", size, said(error)[:LONGEST] if ours else described(error, caller=__file__))
    return replace(verdict, spent=memory.spent(error))


def _arguments(reward: Reward, group: Group, args: Mapping[str, Any], log: Log, *, built_in: bool) -> dict[str, Any]:
    """The keyword arguments for `reward`, by its signature. Raises RewardError if it wants what is not there."""
    parameters = inspect.signature(reward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    # A built-in's settings are its keyword-only parameters: a data column that happens to be called `tag` is none.
    settings = {p.name for p in parameters if built_in and p.kind is p.KEYWORD_ONLY}
    allowed = settings if built_in else names
    unknown = sorted(set(args) - allowed)
    if unknown and (built_in or not open_ended):
        taken = ", ".join(sorted(allowed - {*_OWN})) or "none"
        raise RewardError(f"args: unknown {', '.join(unknown)}; this reward takes {taken}")
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
        raise RewardError(FACTORY if _makes_function(reward, names) else _missing(missing, group, settings))
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
    Raises RewardError if a parameter of the built-in, or the group itself, has the name of one."""
    found: dict[str, Sequence[Any]] = {}
    for arg, value in args.items():
        column = value.partition("[")[0] if arg.endswith("column") and isinstance(value, str) else ""
        if column not in group.columns:
            continue
        if column in names or column in ("prompts", "completion_ids"):
            raise RewardError(f"args.{arg}: cannot be {column!r}, which is no column to this reward; rename the column")
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


def _read(returned: Any, size: int) -> Verdict:
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
