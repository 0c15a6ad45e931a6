"""TRL's environment classes (GRPOTrainer's `environment_factory`), unchanged."""

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

import numpy as np

# As in rollout.env.tools.python_tools: loaded before trajectories' processes are forked.
import torch  # noqa: F401
import transformers.utils.chat_template_utils  # noqa: F401

from cluster.errors import WrongInput
from rewards.base import said
from rewards.loader import load_own
from rollout.config import EPISODE
from rollout.env.config import ENVIRONMENT, TURN_TIMEOUT_S
from rollout.env.protocol import Message, Start, Step, Turn
from rollout.env.tools.functions import Answering, CallLimits, FunctionTool, ToolFailed, named
from rollout.schema import Problem

# TRL's reward functions where they are called with one trajectory at a time.


def given(reward: Callable[..., Any], have: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments that there are, those that the function takes: all, where it takes any."""
    parameters = inspect.signature(reward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(have)
    return {name: value for name, value in have.items() if name in parameters}


def check_given(name: str, reward: Callable[..., Any], have: Mapping[str, Any]) -> None:
    """Raises WrongInput for a function that asks for what there is not."""
    parameters = inspect.signature(reward).parameters.values()
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if missing := [one for one in needed if one not in have]:
        raise WrongInput(
            f"env.args.rewards: {name} asks for {', '.join(missing)}, and there is {', '.join(sorted(have))}; give the "
            "parameter a default"
        )


def load_rewards(uses: Sequence[str], taken: Collection[str] = ()) -> dict[str, Callable[..., Any]]:
    """The functions by the names that their parts of the reward have. taken: the names of other parts.

    Raises WrongInput for a name that leads to no function, and for two parts of one name.
    """
    uses = [uses] if isinstance(uses, str) else uses
    functions = [load_own(use, "my_reward") for use in uses]
    found = {str(getattr(one, "__name__", type(one).__name__)): one for one in functions}
    both = [name for name in taken if name in found]
    if len(found) < len(functions) or both:
        raise WrongInput(
            f"env.args.rewards: each part of the reward must have a name of its own, got {', '.join(uses)}"
            f"{f' beside {both[0]}' if both else ''}; rename a function"
        )
    return found


NOT_TOOLS = ("reset", "get_reward")


class TrlEnvironment:
    """What TRL 1.16 does with an instance (trl/trainer/grpo_trainer.py, _tool_call_loop and __init__):

    Every public method but `reset` and `get_reward` is a tool. `reset(prompt=messages, **columns)` begins; the text
    that it returns, if any, is appended to the last message. Answers of tools are str(), a failure is answered by
    {"error": ...}. A turn without a call ends the trajectory. `get_reward()`, plain or async, is a part of the reward
    with weight 1 and the class's name; None: no reward from it.

    Unlike there: TRL ends a trajectory silently at a call that cannot be read; here it is answered, like other errors.
    A tool that takes longer than timeout_s is answered so. Arguments that do not fit the annotations are refused.
    Python's and numpy's global random numbers are seeded with the group's seed, since TRL's reset has none and all
    trajectories of a group must begin alike.

    factory: what makes an instance, as in `rewards[].use`: path/file.py:Class or package.module:function; or a mapping
        of names to such, of which the column `environment` of the data names one for each problem.
    rewards: functions in TRL's convention that ask for `environments`; called with this instance alone, they see one
        trajectory at a time: `prompts`, `completions` (messages) and every column hold one element. Each is a part of
        the reward with weight 1.
    timeout_s: seconds for one call of a tool.
    turn_timeout_s: seconds for all calls of a turn; those that are left then are answered without being called.
    max_chars: of an answer; a longer one is cut and says so.

    Raises WrongInput for a name that leads to nothing that can be called, and for two parts of the reward with one
    name.
    """

    def __init__(
        self,
        factory: str | Mapping[str, str],
        *,
        rewards: Sequence[str] = (),
        timeout_s: float = 10.0,
        turn_timeout_s: float = TURN_TIMEOUT_S,
        max_chars: int = 4000,
    ) -> None:
        named = {"": factory} if isinstance(factory, str) else factory
        if not isinstance(named, Mapping) or not named or not all(isinstance(one, str) for one in named.values()):
            raise WrongInput(
                "env.args.factory: must be a name such as my.py:Class, or a mapping of names to such, got "
                f"{factory!r:.80}"
            )
        self._several = not isinstance(factory, str)
        self._factories = {name: load_own(one, "MyEnvironment") for name, one in named.items()}
        classes = [getattr(one, "__name__", "") for one in self._factories.values()]
        self._rewards = load_rewards(rewards, classes)
        self._limits = CallLimits(timeout_s, turn_timeout_s, max_chars)
        self._thread = ThreadPoolExecutor(1)  # plain methods all run in one, since some libraries demand it
        self._columns: dict[str, Any] = {}
        self._shown: list[Message] = []  # what the policy began with
        self._completion: list[Message] = []
        self._answers: list[Message] = []  # to the last turn: part of the completion once the policy goes on from them

    async def reset(self, problem: Problem, seed: int) -> Start:
        """Raises WrongInput for a class without reset, or with a method that cannot be a tool."""
        if isinstance(problem.messages, str):
            raise WrongInput("trl_environment: problems must be chat messages, got plain text; see data.prompt")
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._environment = await self._run(self._factory_of(problem))
        names = [name for name, _ in inspect.getmembers(type(self._environment), inspect.isfunction)]
        if "reset" not in names:
            raise WrongInput(
                f"env.args.factory: {type(self._environment).__name__} must have a method reset; write one"
            )
        methods = [n for n in names if n not in NOT_TOOLS and not n.startswith("_")]
        tools = {name: self._tool(getattr(self._environment, name)) for name in methods}
        self._answer = Answering(tools, self._limits, lambda name: f"Tool {name} not found.", _error)
        messages = [dict(message) for message in problem.messages]
        self._columns = {"prompt": messages, **problem.columns}
        seen = await self._run(self._environment.reset, **_wanted(self._environment.reset, self._columns))
        if seen is not None and not isinstance(seen, str):
            raise WrongInput(f"trl_environment: reset must return text or None, got {type(seen).__name__}")
        shown = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + (seen or "")}]
        self._shown = shown
        for name, reward in self._rewards.items():
            check_given(name, reward, self._have())
        return Start(tuple(shown), tuple(tool.spec for tool in tools.values()))

    def _factory_of(self, problem: Problem) -> Callable[..., Any]:
        name = problem.columns.get(ENVIRONMENT) if self._several else ""
        if not isinstance(name, str) or name not in self._factories:
            raise WrongInput(
                f"env.args.factory: must have what the column `{ENVIRONMENT}` of each problem names, and "
                f"{problem.id} names {name!r:.80}; it has {', '.join(self._factories)}"
            )
        return self._factories[name]

    async def step(self, turn: Turn) -> Step:
        """Calls the tools in their order."""
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in turn.calls]
        said = {"role": "assistant", "content": turn.text} | ({"tool_calls": calls} if calls else {})
        self._completion += [*self._answers, said]
        step = await self._answer(turn)
        self._answers = list(step.messages)
        return step

    async def score(self) -> Mapping[str, float]:
        parts = {}
        if hasattr(self._environment, "get_reward"):
            parts[type(self._environment).__name__] = await self._run(self._environment.get_reward)
        for name, reward in self._rewards.items():
            (parts[name],) = await self._run(reward, **given(reward, self._have()))
        return {name: value for name, value in parts.items() if value is not None}

    async def close(self) -> None:
        """TRL's environments have nothing to close them."""
        self._thread.shutdown(wait=False)

    def _tool(self, method: Callable[..., Any]) -> FunctionTool:
        named(method)  # refuses a generator, which cannot be told from outside `called`

        @wraps(method)
        async def called(**arguments: Any) -> str:
            try:
                return str(await self._run(method, **arguments))
            except Exception as error:  # in TRL's words, which leave out the type
                raise ToolFailed(said(error)) from error

        return FunctionTool(called)

    async def _run(self, function: Callable[..., Any], **arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**arguments)
        try:
            called = asyncio.get_running_loop().run_in_executor(self._thread, _called, function, arguments)
            answer = await called
        except asyncio.CancelledError:  # it goes on where it is; the next call has another thread
            self._thread = ThreadPoolExecutor(1)
            raise
        return await answer if isinstance(answer, Awaitable) else answer

    def _have(self) -> dict[str, Any]:
        """The arguments that there are for a reward function, as lists of one."""
        return {name: [value] for name, value in self._columns.items() if name != "prompt"} | {
            "prompts": [self._shown],
            # Cut in its first turn a trajectory has none, and functions look at the first or the last.
            "completions": [self._completion or [{"role": "assistant", "content": ""}]],
            "environments": [self._environment],
        }


def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return function(**arguments)
    except StopIteration:  # no future takes it
        raise RuntimeError("StopIteration") from None


def _error(sentence: str) -> str:
    return str({"error": sentence})


def _wanted(reset: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """All columns, as in TRL. Of an environment's own problems, which have none but a number, that only where it is
    asked for by name, and the empty prompt where it is not refused."""
    if columns.keys() != {"prompt", EPISODE}:
        return dict(columns)
    parameters = inspect.signature(reset).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: columns[name] for name in columns if name in parameters or (name == "prompt" and takes_any)}
