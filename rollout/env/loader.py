"""`env.use` -> an environment. Runs in the environment's process, never in the driver or the generator's."""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Mapping, Sequence
from importlib import import_module
from typing import Any

from rewards.base import RewardError, counts, said
from rewards.config import ENV_COUNTS, TAKEN
from rewards.loader import load_own, no_built_in
from rollout.env.protocol import (
    DEEPEST,
    Asked,
    Hosted,
    Message,
    Model,
    NoMore,
    OutOfBudget,
    Program,
    Sampled,
    Start,
    Step,
    is_text,
    too_deep,
)
from rollout.env.trajectory import TURNS
from rollout.schema import Problem

# An environment's answers on their way from its process: checked there, plain JSON between.

OBSERVED = ("tool", "user")  # roles that may answer a turn
COUNTED = ENV_COUNTS | {"accuracy", "failed", "unscored"}
"""What the driver counts itself as env/<name> or eval/<name>; besides these outcome_<...>."""


class BadAnswer(ValueError):
    """An environment returned something that a trajectory cannot go on with; one sentence."""


def start_to_json(start: Any) -> dict[str, Any]:
    """Raises BadAnswer unless it is a whole rollout.env.protocol.Start, or a program's question."""
    if isinstance(start, Asked):
        return _asked_to_json(start)
    if not isinstance(start, Start):
        raise BadAnswer(f"reset must return a Start, got {type(start).__name__}")
    messages = _messages("reset", start.messages, None)
    if not isinstance(start.tools, Sequence) or not all(_is_tool(tool) for tool in start.tools):
        raise BadAnswer(
            'reset: tools must be a sequence of {"type": "function", "function": {"name": ..., "parameters": {...}}}, '
            f"got {start.tools!r:.80}"
        )
    return {"messages": messages, "tools": [dict(tool) for tool in start.tools], "state": str(start.state)}


def step_to_json(step: Any) -> dict[str, Any]:
    """Raises BadAnswer unless it is a whole rollout.env.protocol.Step that the policy can go on from, or is done; or a
    program's question."""
    if isinstance(step, Asked):
        return _asked_to_json(step)
    if not isinstance(step, Step):
        raise BadAnswer(f"step must return a Step, got {type(step).__name__}")
    messages = _messages("step", step.messages, OBSERVED)
    if not step.done and not messages:
        raise BadAnswer("step: must return at least one message unless it is done, got none")
    reward = None if step.reward is None else _number("step: reward", step.reward)
    if not isinstance(step.warnings, Mapping) or not all(map(is_text, [*step.warnings, *step.warnings.values()])):
        raise BadAnswer(f"step: warnings must come as a mapping from text to text, got {step.warnings!r:.80}")
    told = {"metrics": _metrics(step.metrics), "warnings": dict(step.warnings)}
    return {"messages": messages, "reward": reward, "done": bool(step.done)} | told


def encoded(method: str, value: Any) -> bytes:
    """An answer in JSON. Raises BadAnswer for what JSON cannot hold."""
    if too_deep(value):
        raise BadAnswer(f"{method}: must answer with values that are nested at most {DEEPEST} deep")
    try:
        return json.dumps({"value": value}).encode()
    except (TypeError, ValueError) as error:
        raise BadAnswer(f"{method}: must answer with what JSON can hold: {said(error)}") from None


def start_from_json(answer: dict[str, Any]) -> Start | Asked:
    """The inverse of start_to_json."""
    if "token_ids" in answer:
        return _asked_from_json(answer)
    return Start(tuple(answer["messages"]), tuple(answer["tools"]), answer["state"])


def step_from_json(answer: dict[str, Any]) -> Step | Asked:
    """The inverse of step_to_json."""
    if "token_ids" in answer:
        return _asked_from_json(answer)
    return Step(tuple(answer["messages"]), answer["reward"], answer["done"], answer["metrics"], answer["warnings"])


def parts(values: Any) -> dict[str, float]:
    """Parts of a reward by name. Raises BadAnswer for anything else."""
    if taken := (TAKEN | {TURNS}) & set(found := _numbers("score", values)):
        raise BadAnswer(f"score: a reward is named {', '.join(sorted(taken))} already; give another name")
    return found


def _metrics(values: Any) -> dict[str, float]:
    """Raises BadAnswer unless they are numbers under names that the driver has not taken."""
    found = _numbers("step", values)
    if taken := sorted(name for name in found if name in COUNTED or name.startswith("outcome_")):
        raise BadAnswer(f"step: a metric is named {', '.join(taken)} already; give another name")
    return found


def _numbers(method: str, values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(is_text(name) for name in values):
        raise BadAnswer(f"{method}: numbers must come as a mapping from names, got {values!r:.80}")
    return {name: _number(f"{method}: {name}", value) for name, value in values.items()}


def _asked_to_json(asked: Asked) -> dict[str, Any]:
    if not asked.token_ids or not all(type(token) is int for token in asked.token_ids):
        raise BadAnswer(f"run: a prompt must be token ids, at least one, got {asked.token_ids!r:.80}")
    if asked.max_tokens is not None and (type(asked.max_tokens) is not int or asked.max_tokens < 1):
        raise BadAnswer(f"run: max_tokens must be a number >= 1, got {asked.max_tokens!r:.80}")
    return {"token_ids": list(asked.token_ids), "max_tokens": asked.max_tokens}


def _asked_from_json(answer: dict[str, Any]) -> Asked:
    return Asked(tuple(answer["token_ids"]), answer["max_tokens"])


def _number(what: str, value: Any) -> float:
    if not hasattr(value, "__float__") or not counts(number := float(value)):
        raise BadAnswer(f"{what} must be a finite number of at most 1e30, got {value!r:.80}")
    return number


def _messages(method: str, messages: Any, roles: Sequence[str] | None) -> list[Message]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise BadAnswer(f"{method}: messages must be a sequence of messages, got {type(messages).__name__}")
    for message in messages:
        if not isinstance(message, Mapping) or not is_text(message.get("role")):
            raise BadAnswer(f'{method}: a message must be {{"role": ..., "content": ...}}, got {message!r:.80}')
        for key in ("content", *(key for key in ("name", "tool_call_id") if message.get(key) is not None)):
            if not is_text(message.get(key)):
                got = message.get(key)
                raise BadAnswer(f"{method}: a message's {key} must be text that UTF-8 can hold, got {got!r:.80}")
        if roles is not None and message["role"] not in roles:
            raise BadAnswer(f"{method}: a message's role must be one of {', '.join(roles)}, got {message['role']!r}")
    return [dict(message) for message in messages]


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return (
        isinstance(function, Mapping)
        and is_text(function.get("name"))
        and isinstance(function.get("parameters", {}), Mapping)
    )


# A program in its process, served like an environment: question, answer, next question.


class Driven:
    """A program as its process serves it: each answer to it leads to its next question, or to its end."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._task: asyncio.Task[Mapping[str, float]] | None = None
        self._questions: asyncio.Queue[Asked] = asyncio.Queue()
        self._answers: asyncio.Queue[Sampled | NoMore] = asyncio.Queue()
        self._turn = asyncio.Lock()  # questions that come together are answered one after the other

    async def reset(self, problem: Problem, seed: int) -> Asked:
        """The first question. Raises BadAnswer if there is none, and what the program raises."""
        self._task = asyncio.create_task(_run(self._program, problem, seed, self))
        first = await self._next()
        if isinstance(first, Step):
            raise BadAnswer("run: must ask the policy for a turn before it ends, and did not")
        return first

    async def step(self, answer: Sampled | NoMore) -> Asked | Step:
        """Answers the last question -> the next one, or that the program has ended."""
        self._answers.put_nowait(answer)
        return await self._next()

    async def generate(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Sampled:
        """For the program: see Model."""
        async with self._turn:
            self._questions.put_nowait(Asked(tuple(token_ids), max_tokens))
            answer = await self._answers.get()
        if isinstance(answer, NoMore):
            raise OutOfBudget(answer.reason)
        return answer

    async def score(self) -> Mapping[str, float]:
        """What the program returned."""
        assert self._task is not None
        return await self._task

    async def close(self) -> None:
        """Ends the program where it is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _next(self) -> Asked | Step:
        assert self._task is not None
        question = asyncio.ensure_future(self._questions.get())
        await asyncio.wait([question, self._task], return_when=asyncio.FIRST_COMPLETED)
        if question.done():
            return question.result()
        question.cancel()
        await self._task  # raises what it raised
        return Step(done=True)


async def _run(program: Program, problem: Problem, seed: int, model: Model) -> Mapping[str, float]:
    try:
        running = program.run(problem, seed, model)
        if not isinstance(running, Awaitable):
            raise BadAnswer("run: must be `async def`, since it waits for the policy")
        return await running
    except OutOfBudget:  # an end as others are: rollout.env.play knows of which kind
        return {}


BUILT_INS = {
    "number_guessing": "rollout.env.tasks.number_guessing:NumberGuessing",
    "openenv": "rollout.env.adapters.openenv:OpenEnv",
    "second_try": "rollout.env.tasks.second_try:SecondTry",
    "skyrl_gym": "rollout.env.adapters.skyrl_gym:SkyRLGym",
    "tools": "rollout.env.tools.python_tools:PythonTools",
    "trl_environment": "rollout.env.adapters.trl:TrlEnvironment",
    "trl_rollout_func": "rollout.env.adapters.trl_rollout:TrlRolloutFunc",
    "verifiers": "rollout.env.adapters.verifiers:Verifiers",
}
NAMES = {  # arguments that name code of the user's
    "openenv": ("action", "observe"),
    "skyrl_gym": ("env",),
    "tools": ("functions",),
    "trl_environment": ("factory", "rewards"),
    "trl_rollout_func": ("function", "rewards"),
}
PATHS = {"verifiers": ("python", "model")}  # arguments that are paths
METHODS = ("reset", "step", "score", "close")


def code_of(use: str | None, args: Mapping[str, Any]) -> list[str]:
    """What names the code of an environment as `package.module:name` or `path/file.py:name`: the environment, and what
    it is told to use."""
    if use is None:
        return []
    given = [args.get(name) for name in NAMES.get(use, ())]
    names = [name for one in given for name in _each(one)]
    return [BUILT_INS.get(use, use), *(name for name in names if isinstance(name, str) and ":" in name)]


def _each(given: Any) -> list[Any]:
    if isinstance(given, Mapping):
        return [*given.values()]
    return [*given] if isinstance(given, list | tuple) else [given]


def found(use: str) -> Any:
    """The class or function that `use` names. Raises RewardError with one sentence."""
    if use in BUILT_INS:
        module, _, name = BUILT_INS[use].partition(":")
        return getattr(import_module(module), name)
    if ":" not in use and not use.endswith(".py"):
        raise RewardError(no_built_in(use, "environment", BUILT_INS, "Class"))
    return load_own(use, "MyEnvironment")


def make(use: str, args: Mapping[str, Any]) -> Hosted:
    """One trajectory's environment or program. Raises RewardError if `use` is not found, BadAnswer if it makes
    neither, and what it raises itself."""
    factory = found(use)
    try:
        env = factory(**args)
    except TypeError as error:
        if _takes(factory, args):  # it is an error inside of it
            raise
        told = _misfit(factory, args) or f"must take {', '.join(args) or 'no arguments'}: {said(error)}"
        raise BadAnswer(f"env.args: {use} {told}") from error
    if callable(getattr(env, "run", None)):
        return Driven(env)
    if missing := [name for name in METHODS if not callable(getattr(env, name, None))]:
        raise BadAnswer(
            f"env.use: {use} must make an environment with the methods {', '.join(METHODS)}, or a program with run; "
            f"{type(env).__name__} lacks {', '.join(missing)}"
        )
    made: Hosted = env
    return made


def _takes(factory: Any, args: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(factory).bind(**args)
    except (TypeError, ValueError):  # ValueError: nothing is known of what it takes
        return False
    return True


def _misfit(factory: Any, args: Mapping[str, Any]) -> str:
    """Which arguments are missing, or too many; '' if that is not known."""
    try:
        has = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return ""
    named = {name: one for name, one in has.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if missing := [name for name, one in named.items() if one.default is one.empty and name not in args]:
        return f"needs {', '.join(missing)}; set env.args.{missing[0]} (got {', '.join(args) or 'no arguments'})"
    if surplus := [name for name in args if name not in named]:
        return f"takes {', '.join(named) or 'no arguments'}, got {', '.join(surplus)}; correct it, or leave it out"
    return ""
