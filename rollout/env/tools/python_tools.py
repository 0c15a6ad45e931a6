"""Python functions as tools: an environment that answers calls until a turn has none."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# What makes a function's schema takes seconds to load: so here, before trajectories' processes are forked.
import torch  # noqa: F401  (of which transformers wants the tensors' type)
import transformers.utils.chat_template_utils  # noqa: F401

from rewards.loader import load_own
from rollout.env.protocol import Message, Start, Step, ToolCall, Turn
from rollout.env.tools.function_tool import BadCall, FunctionTool, ToolError, ToolFailed
from rollout.schema import Problem


class PythonTools:
    """The problem as it is in the data, and functions to solve it with. Rewards come from reward functions.

    Every call is answered by one message of role tool, in the order of the calls: by what the function returned, or by
    what was wrong (no such tool, arguments that do not fit, an exception, no answer in time), so that a failure is
    never free of consequences for the policy. An attempt at a call that could not be read is answered too. The
    trajectory is over with the first turn that calls nothing.

    Metrics of a step: calls, bad_calls (no such tool, or wrong arguments), malformed, tool_errors (exceptions and
    time-outs), cut_answers.

    functions: functions, or names of them as in `rewards[].use`: package.module:function, path/file.py:function.
    timeout_s: seconds for one call.
    max_chars: of one answer; a longer one is cut and says so.

    Raises ToolError, before anything is sampled, for a function that cannot be a tool and for two of one name;
    rewards.base.RewardLoadError for a name that leads to no function.
    """

    def __init__(
        self, functions: Sequence[str | Callable[..., Any]], *, timeout_s: float = 10.0, max_chars: int = 4000
    ) -> None:
        if not functions or timeout_s <= 0 or max_chars < 1:
            raise ToolError(
                "tools: must be at least one function, with timeout_s and max_chars above 0, got "
                f"{len(functions)} functions, timeout_s {timeout_s:g}, max_chars {max_chars}"
            )
        tools = [FunctionTool(load_own(one, "my_tool") if isinstance(one, str) else one) for one in functions]
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ToolError(f"tools: names must differ, got {', '.join(tool.name for tool in tools)}; rename one")
        self._timeout_s, self._max_chars = timeout_s, max_chars

    async def reset(self, problem: Problem, seed: int) -> Start:
        if isinstance(problem.messages, str):
            raise ToolError("tools: problems must be chat messages, got plain text; use a model with a chat template")
        return Start(problem.messages, tuple(tool.spec for tool in self._tools.values()))

    async def step(self, turn: Turn) -> Step:
        counts = {"calls": 0.0, "bad_calls": 0.0, "malformed": 0.0, "tool_errors": 0.0, "cut_answers": 0.0}
        messages = [await self._answer(call, counts) for call in turn.calls]
        messages += [{"role": "tool", "content": sentence} for sentence in turn.malformed]
        counts["calls"], counts["malformed"] = float(len(turn.calls)), float(len(turn.malformed))
        return Step(tuple(messages), done=not messages, metrics=counts)

    async def score(self) -> Mapping[str, float]:
        return {}

    async def close(self) -> None:
        return None

    async def _answer(self, call: ToolCall, counts: dict[str, float]) -> Message:
        if call.name not in self._tools:
            counts["bad_calls"] += 1
            said = f"There is no tool {call.name[:100]!r}; the tools are {', '.join(self._tools)}."
            return {"role": "tool", "content": said}
        try:
            answer = await self._tools[call.name].call(call.arguments, self._timeout_s)
        except BadCall as error:
            counts["bad_calls"] += 1
            answer = str(error)
        except ToolFailed as error:
            counts["tool_errors"] += 1
            answer = str(error)
        if len(answer) > self._max_chars:
            counts["cut_answers"] += 1
            answer = f"{answer[: self._max_chars]}\n[cut: the first {self._max_chars} of {len(answer)} characters]"
        return {"role": "tool", "name": call.name, "content": answer}
