"""Python functions as tools: an environment that answers calls until a turn has none."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# What makes a function's schema takes seconds to load: so here, before trajectories' processes are forked.
import torch  # noqa: F401  (of which transformers wants the tensors' type)
import transformers.utils.chat_template_utils  # noqa: F401

from cluster.errors import WrongInput
from rewards.loader import load_own
from rollout.env.config import TURN_TIMEOUT_S
from rollout.env.protocol import Start, Step, Turn
from rollout.env.tools.functions import Answering, CallLimits, FunctionTool
from rollout.schema import Problem


class PythonTools:
    """The problem as it is in the data, and functions to solve it with. Rewards come from reward functions.

    Every call is answered by one message of role tool, in the order of the calls: by what the function returned, or by
    what was wrong (no such tool, arguments that do not fit, an exception, no answer in time), so that a failure is
    never free of consequences for the policy. An attempt at a call that could not be read is answered too. The
    trajectory is over with the first turn that calls nothing.

    Metrics and warnings of a step: see rollout.env.tools.functions.Answering.

    functions: functions, or names of them as in `rewards[].use`: package.module:function, path/file.py:function.
    timeout_s: seconds for one call.
    turn_timeout_s: seconds for all calls of a turn; those that are left then are answered without being called.
    max_chars: of one answer; a longer one is cut and says so.

    Raises WrongInput, before anything is sampled, for a function that cannot be a tool, for two of one name, and for a
    name that leads to no function.
    """

    def __init__(
        self,
        functions: Sequence[str | Callable[..., Any]],
        *,
        timeout_s: float = 10.0,
        turn_timeout_s: float = TURN_TIMEOUT_S,
        max_chars: int = 4000,
    ) -> None:
        functions = [functions] if isinstance(functions, str) else functions
        if not functions:
            raise WrongInput("tools: must be at least one function, got none; name one in env.args.functions")
        tools = [FunctionTool(load_own(one, "my_tool") if isinstance(one, str) else one) for one in functions]
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise WrongInput(f"tools: names must differ, got {', '.join(tool.name for tool in tools)}; rename one")
        self._answer = Answering(self._tools, CallLimits(timeout_s, turn_timeout_s, max_chars), self._no_tool)

    async def reset(self, problem: Problem, seed: int) -> Start:
        if isinstance(problem.messages, str):
            raise WrongInput("tools: problems must be chat messages, got plain text; use a model with a chat template")
        return Start(problem.messages, tuple(tool.spec for tool in self._tools.values()))

    async def step(self, turn: Turn) -> Step:
        return await self._answer(turn)

    async def score(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        return None

    def _no_tool(self, name: str) -> str:
        return f"There is no tool {name!r}; the tools are {', '.join(self._tools)}."
