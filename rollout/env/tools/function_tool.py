"""One Python function as a tool: its schema for the chat template, the check of arguments, and the call."""

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from cluster.deadline import within
from rewards.base import said
from rollout.env.plain import as_text
from rollout.env.tools.tool_schema import arguments_of, named, spec_of

MAX_SAID = 500  # characters of an exception's text that are worth showing to the policy


class BadCall(ValueError):
    """Arguments that do not fit the function; the message is for the policy."""


class ToolFailed(RuntimeError):
    """The function raised, took too long, or returned what has no text; the message is for the policy. Its cause: what
    the function raised."""


class FunctionTool:
    """A plain or async function that a policy may call.

    function: every parameter is annotated and described in the docstring (Google style, without types), since the JSON
    schema that the chat template shows is made of them (rollout.env.tools.tool_schema).

    Raises ToolError for a function of which no schema can be made.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name, shown = named(function)
        self._function = function
        self._arguments = arguments_of(shown, self.name)
        self.spec = spec_of(shown, self.name, self._arguments)

    async def call(self, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """The function's answer as text: a string as it is, all else as JSON.

        An async function runs in this event loop and is cancelled when its time is over. A plain one runs in a thread,
        which goes on until the process ends: no thread can be stopped from outside.

        Raises BadCall and ToolFailed.
        """
        try:
            checked = self._arguments.model_validate_json(json.dumps(arguments), strict=True)
        except RecursionError:
            raise BadCall(f"{self.name} was not called, since its arguments are nested too deeply") from None
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5])
            raise BadCall(f"{self.name} was not called, since its arguments are wrong: {wrong}") from None
        given = {
            str(field.alias): getattr(checked, name)
            for name, field in type(checked).model_fields.items()
            if name in checked.model_fields_set
        }
        try:
            async with within(timeout_s) as deadline:
                return _text(await self._run(given))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # it is we who are cancelled, not a task of the function
            raise ToolFailed(f"{self.name} failed: it was cancelled") from None
        except ToolFailed:  # a tool that says so itself
            raise
        except BaseException as error:  # sys.exit() in a tool is its failure, not the environment's end
            if deadline.expired() and isinstance(error, TimeoutError):
                raise ToolFailed(f"{self.name} was stopped after {timeout_s:.3g} s without an answer") from None
            raise ToolFailed(
                f"{self.name} failed: {type(error).__name__}: {as_text(said(error))[:MAX_SAID]}"
            ) from error

    async def _run(self, given: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**given)
        answer = await _in_thread(lambda: self._function(**given))
        return await answer if isinstance(answer, Awaitable) else answer


async def _in_thread(function: Callable[[], Any]) -> Any:
    """As asyncio.to_thread, but a call that never returns does not keep the process from ending."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def tell(answer: Any, error: BaseException | None) -> None:
        if done.done():  # nobody waits any more
            return
        done.set_exception(error) if error is not None else done.set_result(answer)

    def run() -> None:
        answer, failed = None, None
        try:
            answer = function()
        except BaseException as error:
            failed = RuntimeError("StopIteration") if isinstance(error, StopIteration) else error  # no future takes it
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(tell, answer, failed)

    threading.Thread(target=run, daemon=True).start()
    return await done


def _text(answer: Any) -> str:
    return as_text(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str))
