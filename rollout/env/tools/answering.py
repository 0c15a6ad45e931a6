"""The calls of a turn, answered in their order within the turn's time."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rewards.described import OF_ENVIRONMENTS, described
from rollout.env.plain import as_text
from rollout.env.protocol import Message, Step, ToolCall, Turn
from rollout.env.tools.function_tool import BadCall, FunctionTool, ToolFailed
from rollout.env.tools.tool_calls import MAX_NAME
from rollout.env.tools.tool_schema import ToolError


@dataclass(frozen=True, slots=True)
class CallLimits:
    """timeout_s: seconds for one call. turn_timeout_s: for all calls of a turn together; must be below
    env.step_timeout_s, beyond which the trajectory would end without a reward. max_chars: of an answer."""

    timeout_s: float
    turn_timeout_s: float
    max_chars: int

    def __post_init__(self) -> None:
        if min(self.timeout_s, self.turn_timeout_s) <= 0 or self.max_chars < 1:
            raise ToolError(
                "env.args: timeout_s, turn_timeout_s and max_chars must be above 0, got "
                f"{self.timeout_s:g}, {self.turn_timeout_s:g} and {self.max_chars}; raise them"
            )


class Answering:
    """Answers every call by one message of role tool: by what the tool returned, or by what was wrong.

    no_tool: the name of a tool that is not there -> what the policy is told. error: a sentence about what was wrong ->
    the answer.
    """

    def __init__(
        self,
        tools: Mapping[str, FunctionTool],
        limits: CallLimits,
        no_tool: Callable[[str], str],
        error: Callable[[str], str] = str,
    ) -> None:
        self._tools, self._limits, self._no_tool, self._error = tools, limits, no_tool, error

    async def __call__(self, turn: Turn) -> Step:
        """Messages for the calls, then for attempts that could not be read; done without any. Its metrics: bad_calls
        (no such tool, or wrong arguments), tool_errors (exceptions, time-outs, no time left), cut_answers. Warnings:
        of each tool the first failure of a kind, which may come of a wrong key or a missing package as well as of what
        the policy wrote."""
        counts = {"bad_calls": 0.0, "tool_errors": 0.0, "cut_answers": 0.0}
        left_s, messages, warnings = self._limits.turn_timeout_s, list[Message](), dict[str, str]()
        for call in turn.calls:
            begun = time.monotonic()
            messages.append(await self._answer(call, left_s, counts, warnings))
            left_s -= min(time.monotonic() - begun, self._limits.timeout_s)  # if it took more, this process stood still
        messages += [{"role": "tool", "content": self._error(sentence)} for sentence in turn.malformed]
        return Step(tuple(messages), done=not messages, metrics=counts, warnings=warnings)

    async def _answer(
        self, call: ToolCall, left_s: float, counts: dict[str, float], warnings: dict[str, str]
    ) -> Message:
        try:
            answer = await self._call(call, left_s)
        except BadCall as error:
            counts["bad_calls"] += 1
            answer = self._error(str(error))
        except ToolFailed as error:
            counts["tool_errors"] += 1
            kind = type(error.__cause__ or error).__name__
            warnings.setdefault(f"{call.name}: {kind}", _warning(call.name, error))
            answer = self._error(str(error))
        most = self._limits.max_chars
        if len(answer) > most:
            counts["cut_answers"] += 1
            answer = f"{answer[:most]}\n[cut: the first {most} of {len(answer)} characters]"
        return {"role": "tool", "content": answer} | ({"name": call.name} if call.name in self._tools else {})

    async def _call(self, call: ToolCall, left_s: float) -> str:
        if call.name not in self._tools:
            raise BadCall(self._no_tool(call.name[:MAX_NAME]))
        if left_s <= 0:
            seconds = self._limits.turn_timeout_s
            raise ToolFailed(f"{call.name} was not called: the {seconds:g} s for the calls of a turn are over")
        return await self._tools[call.name].call(call.arguments, min(self._limits.timeout_s, left_s))


def _warning(tool: str, error: ToolFailed) -> str:
    cause = error.__cause__
    told = f"{tool} raised {described(cause, OF_ENVIRONMENTS)}" if cause is not None else str(error)
    return as_text(f"env: the tool {told}; the policy is answered so, and env/tool_errors counts it")
