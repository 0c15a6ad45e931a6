"""Runs in an environment's process: makes the one environment or program that `env.use` names, and serves its methods
over a socket until the socket closes. rollout.env.process is the other side, in the generator.

Requests arrive pickled, answers are sent as JSON, so that no value of a user's code is unpickled in another process.
Each message is preceded by its length in 8 bytes.
"""

import asyncio
import contextlib
import inspect
import json
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import import_module
from io import TextIOWrapper
from multiprocessing import forkserver
from typing import Any, NamedTuple, NoReturn

from cluster.child import keep_from_children
from cluster.errors import WrongInput
from rewards.base import counts, said, writable
from rewards.config import ENV_COUNTS, TAKEN
from rewards.limits import OF_ENVIRONMENTS, described, lent
from rewards.loader import load_own, no_built_in
from rewards.slot import confine
from rollout.env.protocol import (
    DEEPEST,
    Asked,
    Hosted,
    Message,
    Model,
    NoMore,
    OutOfBudget,
    Program,
    Question,
    Refused,
    Said,
    Sampled,
    Start,
    Step,
    is_text,
    too_deep,
)
from rollout.env.trajectory import TURNS
from rollout.schema import Problem

# The environment's answers: checked here, converted to JSON, and back in the generator.

OBSERVED = ("tool", "user")  # roles of messages that may answer a turn
COUNTED = ENV_COUNTS | {"accuracy", "failed", "unscored"}
"""Metrics env/<name> and eval/<name> that the driver itself counts, as it does outcome_<...>; environments must not use
these names."""


class BadAnswer(ValueError):
    """An environment returned something that a trajectory cannot go on with; one sentence. It ends as
    `bad_observation` (_serve)."""


def start_to_json(start: Any) -> dict[str, Any]:
    """What reset returned, as JSON values. Raises BadAnswer unless it is a valid Start, or a program's request."""
    if isinstance(start, Question | Asked):
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
    """What step returned, as JSON values. Raises BadAnswer unless it is a program's request, or a valid Step that is
    done or has messages for the policy."""
    if isinstance(step, Question | Asked):
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
    """An answer encoded as JSON. Raises BadAnswer if JSON cannot hold it."""
    if too_deep(value):
        raise BadAnswer(f"{method}: must answer with values that are nested at most {DEEPEST} deep")
    try:
        return json.dumps({"value": value}).encode()
    except (TypeError, ValueError) as error:
        raise BadAnswer(f"{method}: must answer with what JSON can hold: {said(error)}") from None


def start_from_json(answer: dict[str, Any]) -> Start | Question | Asked:
    """The inverse of start_to_json."""
    if answer.keys() & ASKED:
        return _asked_from_json(answer)
    return Start(tuple(answer["messages"]), tuple(answer["tools"]), answer["state"])


def step_from_json(answer: dict[str, Any]) -> Step | Question | Asked:
    """The inverse of step_to_json."""
    if answer.keys() & ASKED:
        return _asked_from_json(answer)
    return Step(tuple(answer["messages"]), answer["reward"], answer["done"], answer["metrics"], answer["warnings"])


def parts(values: Any) -> dict[str, float]:
    """What score returned, as name -> part of the reward. Raises BadAnswer for other values or a name that is taken."""
    if taken := (TAKEN | {TURNS}) & set(found := _numbers("score", values)):
        raise BadAnswer(f"score: a reward is named {', '.join(sorted(taken))} already; give another name")
    return found


def _metrics(values: Any) -> dict[str, float]:
    """A step's metrics. Raises BadAnswer unless they are numbers with names that the driver does not use."""
    found = _numbers("step", values)
    if taken := sorted(name for name in found if name in COUNTED or name.startswith("outcome_")):
        raise BadAnswer(f"step: a metric is named {', '.join(taken)} already; give another name")
    return found


def _numbers(method: str, values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping) or not all(is_text(name) for name in values):
        raise BadAnswer(f"{method}: numbers must come as a mapping from names, got {values!r:.80}")
    return {name: _number(f"{method}: {name}", value) for name, value in values.items()}


ASKED = frozenset({"token_ids", "asked"})  # keys by which an answer is a program's request: with tokens, or messages


def _asked_to_json(asked: Question | Asked) -> dict[str, Any]:
    if isinstance(asked, Asked):
        return {"asked": asked._asdict()}
    if not asked.token_ids or not all(type(token) is int for token in asked.token_ids):
        raise BadAnswer(f"run: a prompt must be token ids, at least one, got {asked.token_ids!r:.80}")
    if asked.max_tokens is not None and (type(asked.max_tokens) is not int or asked.max_tokens < 1):
        raise BadAnswer(f"run: max_tokens must be a number >= 1, got {asked.max_tokens!r:.80}")
    return {"token_ids": list(asked.token_ids), "max_tokens": asked.max_tokens}


def _asked_from_json(answer: dict[str, Any]) -> Question | Asked:
    if "asked" in answer:
        given = answer["asked"]
        return Asked(**given | {name: tuple(given[name]) for name in ("messages", "tools", "stop")})
    return Question(tuple(answer["token_ids"]), answer["max_tokens"])


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


# A program is served with the methods of an environment: each step answers one of its requests.


class Driven:
    """A program as a Hosted: reset returns its first request, step answers a request and returns the next, or the end.

    It is also the Model that the program asks.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._task: asyncio.Task[Mapping[str, float]] | None = None
        self._requests: asyncio.Queue[tuple[Question | Asked, asyncio.Future[Any]]] = asyncio.Queue()
        self._asking: asyncio.Future[Any] | None = None  # for the answer to the last request

    async def reset(self, problem: Problem, seed: int) -> Question | Asked:
        """Starts the program; returns its first request. Raises BadAnswer if it makes none, and what it raises."""
        self._task = asyncio.create_task(_run(self._program, problem, seed, self))
        first = await self._next()
        if isinstance(first, Step):
            raise BadAnswer("run: must ask the policy for a turn before it ends, and did not")
        return first

    async def step(self, answer: Sampled | Said | NoMore | Refused) -> Question | Asked | Step:
        """Answers the last request; returns the next one, or a Step that is done if the program has ended."""
        assert self._asking is not None
        if not self._asking.done():  # the program has cancelled the call
            self._asking.set_result(answer)
        return await self._next()

    async def generate(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Sampled:
        """Called by the program: see Model.generate."""
        answer = await self._ask(Question(tuple(token_ids), max_tokens))
        if isinstance(answer, NoMore):
            raise OutOfBudget(answer.reason)
        sampled: Sampled = answer
        return sampled

    async def converse(self, asked: Asked) -> Said | NoMore | Refused:
        """Called by the program: see Conversing.converse."""
        answer: Said | NoMore | Refused = await self._ask(asked)
        return answer

    async def _ask(self, request: Question | Asked) -> Any:
        """Requests at the same time are answered one after the other."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._requests.put_nowait((request, answer))
        return await answer

    async def score(self) -> Mapping[str, float]:
        """The parts of the reward that the program returned."""
        assert self._task is not None
        return await self._task

    async def close(self) -> None:
        """Cancels the program."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _next(self) -> Question | Asked | Step:
        assert self._task is not None
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait([request, self._task], return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            asked, self._asking = request.result()
            return asked
        request.cancel()
        await self._task  # raises the program's exception, if it ended by one
        return Step(done=True)


async def _run(program: Program, problem: Problem, seed: int, model: Model) -> Mapping[str, float]:
    try:
        running = program.run(problem, seed, model)
        if not isinstance(running, Awaitable):
            raise BadAnswer("run: must be `async def`, since it waits for the policy")
        return await running
    except OutOfBudget:  # this is no fault: rollout.env.play has recorded which limit was reached
        return {}


BUILT_INS = {
    "number_guessing": "rollout.env.tasks.number_guessing:NumberGuessing",
    "openenv": "rollout.env.adapters.openenv:OpenEnv",
    "program": "rollout.env.adapters.program:AgentProgram",
    "second_try": "rollout.env.tasks.second_try:SecondTry",
    "skyrl_gym": "rollout.env.adapters.skyrl_gym:SkyRLGym",
    "tools": "rollout.env.tools.python_tools:PythonTools",
    "trl_environment": "rollout.env.adapters.trl:TrlEnvironment",
    "trl_rollout_func": "rollout.env.adapters.trl:TrlRolloutFunc",
    "verifiers": "rollout.env.adapters.verifiers:Verifiers",
}
NAMES = {  # `env.use` -> arguments that name a user's code
    "openenv": ("action", "observe"),
    "program": ("function",),
    "skyrl_gym": ("env",),
    "tools": ("functions",),
    "trl_environment": ("factory", "rewards"),
    "trl_rollout_func": ("function", "rewards"),
}
PATHS = {"verifiers": ("python", "model")}  # `env.use` -> arguments that are paths
METHODS = ("reset", "step", "score", "close")


def code_of(use: str | None, args: Mapping[str, Any]) -> list[str]:
    """The names of the environment's code and of the code that its arguments name, each as `package.module:name` or
    `path/file.py:name`."""
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
    """The class or function that `use` names. Raises WrongInput if there is none."""
    if use in BUILT_INS:
        module, _, name = BUILT_INS[use].partition(":")
        return getattr(import_module(module), name)
    if ":" not in use and not use.endswith(".py"):
        raise WrongInput(no_built_in(use, "environment", BUILT_INS, "Class"))
    return load_own(use, "MyEnvironment")


def make(use: str, args: Mapping[str, Any]) -> Hosted:
    """Makes the environment or program of one trajectory. Raises WrongInput if `use` is not found, BadAnswer if it
    does not take the arguments or makes neither, and what it raises itself."""
    factory = found(use)
    try:
        env = factory(**args)
    except TypeError as error:
        if _takes(factory, args):  # the arguments fit, so the error comes from the user's code
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
    except (TypeError, ValueError):  # ValueError: the signature is not known
        return False
    return True


def _misfit(factory: Any, args: Mapping[str, Any]) -> str:
    """A clause that says which arguments are missing or unknown; "" if that cannot be told."""
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


LENGTH = 8  # bytes before each message
MOST_BYTES = 2**20  # greatest size of an answer; a longer one is the fault `flood`
MOST_IDS_BYTES = 16 * 2**20  # greatest size of a program's request, which holds all that came before


class Spec(NamedTuple):
    """The settings from which a process makes its environment.

    use, args: env.use and env.args. variables: environment variables that no other process may see. memory: most bytes
    that the process may hold. seconds: time for loading the code.
    """

    use: str
    args: Mapping[str, Any]
    variables: Mapping[str, str]
    memory: int
    seconds: float


def host(end: socket.socket, spec: Spec, folder: str) -> None:
    """The main function of an environment's process: serves the environment until the socket closes.

    folder: for temporary files; it is removed by whoever ends the process.
    """
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    _leave_the_server_to_its_owner()
    _part_from_the_others()
    keep_from_children(end.fileno())
    confine(spec.memory, os.getppid())  # if the parent has ended already, the socket's other end is closed
    with lent(spec.variables), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # the socket closed
        asyncio.run(_serve(end, spec))
    os._exit(0)  # does not wait for threads that the environment has left behind


def _leave_the_server_to_its_owner() -> None:
    """Closes this process's end of the pipe that keeps the fork server alive.

    The server lives as long as any process holds the pipe to its owner, the generator, and each forked process inherits
    an end: a hanging environment would outlive a killed generator. With this end closed the server ends with its owner,
    and the kernel ends this process with the server (rewards.slot.confine).
    """
    server: Any = forkserver._forkserver
    os.close(server._forkserver_alive_fd)


def _part_from_the_others() -> None:
    """Gives this process its own random numbers of numpy, which unlike Python's are the same in all forked processes.
    Also has each printed line written at once, since the process is killed at its end."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


async def _serve(end: socket.socket, spec: Spec) -> NoReturn:
    """Answers requests until the other end of the socket closes; then raises IncompleteReadError or ConnectionError."""
    reader, writer = await asyncio.open_connection(sock=end)
    env: Hosted | None = None
    while True:
        method, *arguments = pickle.loads(await read(reader))
        try:
            if env is None:  # an environment may itself be false, for example with length 0
                env = make(spec.use, spec.args)
            value = await _METHODS[method](env, *arguments)
            answer = _bounded(method, encoded(method, value), isinstance(value, dict) and bool(value.keys() & ASKED))
        except BadAnswer as error:
            answer = _fault("bad_observation", str(error))
        except WrongInput as error:  # the message comes from gleaner and is complete
            answer = _fault("env_error", str(error))
        except BaseException as error:  # also SystemExit: sys.exit() in an environment must not end the process
            answer = _fault("env_error", f"{method}: {described(error, OF_ENVIRONMENTS, caller=__file__)}")
        write(writer, answer)
        await writer.drain()


def _bounded(method: str, answer: bytes, of_ids: bool) -> bytes:
    most = MOST_IDS_BYTES if of_ids else MOST_BYTES
    if len(answer) <= most:
        return answer
    return _fault("flood", f"{method}: answered with {len(answer)} bytes, at most {most} are taken")


def _fault(outcome: str, sentence: str) -> bytes:
    return json.dumps({"outcome": outcome, "sentence": writable(sentence)}).encode()


async def _answer(value: Any) -> Any:
    """The result of a method that may be plain or async. A plain one may block, since nothing else runs here."""
    return await value if isinstance(value, Awaitable) else value


async def _reset(env: Hosted, *arguments: Any) -> dict[str, Any]:
    return start_to_json(await _answer(env.reset(*arguments)))


async def _step(env: Hosted, turn: Any) -> dict[str, Any]:
    return step_to_json(await _answer(env.step(turn)))


async def _score(env: Hosted) -> dict[str, float]:
    return parts(await _answer(env.score()))


async def _close(env: Hosted) -> None:
    await _answer(env.close())


_METHODS: dict[str, Callable[..., Awaitable[Any]]] = {
    "reset": _reset, "step": _step, "score": _score, "close": _close,
}  # fmt: skip


async def read(reader: asyncio.StreamReader) -> bytes:
    """The next message. Raises IncompleteReadError when the other end has closed."""
    length = int.from_bytes(await reader.readexactly(LENGTH))
    return await reader.readexactly(length)


def write(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Sends a message."""
    writer.write(len(message).to_bytes(LENGTH) + message)
