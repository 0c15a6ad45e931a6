"""TRL's environment classes (GRPOTrainer's `environment_factory`) and rollout functions (`rollout_func`), unchanged."""

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
from transformers import AutoTokenizer

from cluster.errors import WrongInput
from rewards.base import said
from rewards.loader import load_own
from rollout.config import EPISODE
from rollout.env.config import ENVIRONMENT, TURN_TIMEOUT_S
from rollout.env.host import BadAnswer
from rollout.env.protocol import Message, Model, OutOfBudget, Sampled, Start, Step, Turn
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


# TRL's rollout functions (GRPOTrainer's `rollout_func`) as programs.

# What a TRL rollout_func is given for its trainer: a tokenizer, settings and the policy, and nothing else.


class Offered:
    """An object with these attributes alone. Raises AttributeError for any other, with what there is instead."""

    def __init__(self, name: str, attributes: Mapping[str, Any]) -> None:
        self._offered = dict(attributes)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._offered[name]
        except KeyError:
            raise AttributeError(
                f"rollout_func: {self._name}.{name} is not here, where one trajectory is played in a process of its "
                f"own; there are {', '.join(sorted(self._offered))}; plain values go into env.args.settings"
            ) from None


def trainer_of(
    processing_class: Any, settings: Mapping[str, Any], ask: Callable[[Sequence[int], int | None], Sampled]
) -> Offered:
    """The stand-in. settings: attributes of the trainer's `args`, which TRL's trainer repeats as its own; a prompt has
    one completion, whatever they say. ask: continues ids, by at most so many.

    `vllm_generation.generate` is TRL 1.16's (trl/generation/vllm_generation.py): prompts as ids -> prompt_ids,
    completion_ids, logprobs and logprob_token_ids, the latter two [prompt][token][1]. Each turn may have
    `max_completion_length` tokens, if the settings have that.
    """
    most = settings.get("max_completion_length")

    def generate(prompts: Sequence[Sequence[int]], images: Any = None, num_generations: int = 1, profiler: Any = None,
                 ) -> tuple[list[Any], ...]:  # fmt: skip
        if images is not None and any(one is not None for one in images):
            raise AttributeError("rollout_func: vllm_generation.generate takes no images here; leave them out")
        if (len(prompts), num_generations) != (1, 1):
            raise AttributeError(
                "rollout_func: vllm_generation.generate must be asked for one completion of one prompt, since one "
                f"trajectory is played at a time, got {len(prompts)} prompts and num_generations {num_generations}; "
                "take trainer.num_generations, which is 1, and one prompt"
            )
        prompt = [int(token) for token in prompts[0]]
        sampled = ask(prompt, most)
        logprobs = [[logprob] for logprob in sampled.logprobs]
        return [prompt], [sampled.token_ids], [logprobs], [[[token] for token in sampled.token_ids]]

    own = dict(settings) | {"num_generations": 1, "num_generations_eval": 1, "use_vllm": True}
    generation = Offered("trainer.vllm_generation", {"generate": generate})
    parts = {"args": Offered("trainer.args", own), "processing_class": processing_class, "vllm_generation": generation}
    return Offered("trainer", own | parts)


REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


class TrlRolloutFunc:
    """What TRL 1.16 does with rollout_func(prompts, trainer) (trl/trainer/grpo_trainer.py, _generate), for one prompt.

    It is called in a thread, with the problem's messages and a stand-in trainer (trl_trainer.py). What it samples is
    recorded where it is sampled; what it returns is compared with that and has to be the same: `prompt_ids`,
    `completion_ids`, and `env_mask` (1: sampled) where others wrote between the turns. `logprobs` must be there and are
    not looked at. Tokens behind the last sampled one are left out. Other fields go to the reward functions.

    function: the rollout function, as in `rewards[].use`.
    model: folder of the model, whose tokenizer is the `processing_class`.
    settings: what `trainer.args` is to hold, plain values.
    rewards: reward functions in TRL's convention, called with lists of one: `prompts`, `completions`, `completion_ids`,
        columns, and the other fields that the function returned. Each is a part of the reward with weight 1.
    cut: what each of them is where the trajectory's turns or tokens were over before the function returned.

    Python's and numpy's global random numbers are seeded with the group's seed.

    Raises WrongInput for a name that leads to nothing that can be called, and for two reward functions of one name.
    """

    def __init__(
        self,
        function: str,
        model: str,
        *,
        settings: Mapping[str, Any] | None = None,
        rewards: Sequence[str] = (),
        cut: float = 0.0,
    ) -> None:
        self._function = load_own(function, "my_rollout_func")
        self._rewards = load_rewards(rewards)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._settings, self._cut = dict(settings or {}), cut

    async def run(self, problem: Problem, seed: int, model: Model) -> Mapping[str, float]:
        """The function's rewards. Raises BadAnswer for an answer that differs from what was sampled."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        record, loop = _Record(model), asyncio.get_running_loop()

        def ask(token_ids: Sequence[int], most: int | None) -> Sampled:
            return asyncio.run_coroutine_threadsafe(record.generate(token_ids, most), loop).result()

        said = problem.messages
        prompt = said if isinstance(said, str) else [dict(message) for message in said]
        trainer = trainer_of(self._tokenizer, self._settings, ask)
        try:
            output = await loop.run_in_executor(ThreadPoolExecutor(1), self._function, [prompt], trainer)
        except OutOfBudget:
            return dict.fromkeys(self._rewards, self._cut)
        extra = _checked(output, record)
        have = {name: [value] for name, value in problem.columns.items()} | {
            "prompts": [prompt],
            "completions": [self._completion(record.ids, isinstance(prompt, list))],
            "completion_ids": [record.ids],
        }
        have |= {name: value[:1] if isinstance(value, list) else [value] for name, value in extra.items()}
        parts = {}
        for name, reward in self._rewards.items():
            told = reward(**given(reward, have))
            (parts[name],) = await told if isinstance(told, Awaitable) else told
        return {name: value for name, value in parts.items() if value is not None}

    def _completion(self, ids: Sequence[int], chat: bool) -> Any:
        text = str(self._tokenizer.decode(ids, skip_special_tokens=True))
        return [{"role": "assistant", "content": text}] if chat else text


class _Record:
    """The policy, and what was asked and sampled. mask: [T], 1 where it was sampled."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.prompt: list[int] = []
        self.ids: list[int] = []
        self.mask: list[int] = []

    async def generate(self, token_ids: Sequence[int], most: int | None) -> Sampled:
        sampled = await self._model.generate(token_ids, most)  # answered only if the prompt extends what was before
        self.prompt = self.prompt or list(token_ids)
        between = token_ids[len(self.prompt) + len(self.ids) :]
        self.ids += [*between, *sampled.token_ids]
        self.mask += [0] * len(between) + [1] * len(sampled.token_ids)
        return sampled


def _checked(output: Any, record: _Record) -> dict[str, Any]:
    """The fields for the reward functions."""
    if not isinstance(output, Mapping) or (missing := [name for name in REQUIRED if name not in output]):
        lacks = f"lacks {', '.join(missing)}" if isinstance(output, Mapping) else f"is {type(output).__name__}"
        raise BadAnswer(f"rollout_func: must return a dict with {', '.join(REQUIRED)}, and what it returned {lacks}")
    ids, count = _one("completion_ids", output["completion_ids"]), len(record.ids)
    if "env_mask" not in output and 0 in record.mask:
        raise BadAnswer(
            "rollout_func: env_mask must be returned where others wrote between the turns, here "
            f"{record.mask.count(0)} tokens; return 1 for each sampled token and 0 for each other"
        )
    mask = _one("env_mask", output["env_mask"]) if "env_mask" in output else [1] * len(ids)
    _same("prompt_ids", _one("prompt_ids", output["prompt_ids"]), record.prompt)
    _same("completion_ids", ids[:count], record.ids)
    _same("env_mask", mask, record.mask + [0] * (len(ids) - count))
    return {name: value for name, value in output.items() if name not in (*REQUIRED, "env_mask")}


def _one(name: str, rows: Any) -> list[int]:
    if len(rows) != 1:
        raise BadAnswer(f"rollout_func: {name} must hold one completion, for its one prompt, got {len(rows)}")
    return [int(value) for value in rows[0]]


def _same(name: str, told: Sequence[int], recorded: Sequence[int]) -> None:
    if list(told) == list(recorded):
        return
    place = next((i for i, (a, b) in enumerate(zip(told, recorded, strict=False)) if a != b), None)
    differs = f"{told[place]} at {place}, not {recorded[place]}" if place is not None else f"{len(told)} of them"
    raise BadAnswer(
        f"rollout_func: {name} must be what was asked and sampled, {len(recorded)} values, got {differs}; return the "
        "ids that vllm_generation.generate gave, and what stood between them"
    )
