"""One Python function as a tool: its schema for the chat template, the check of arguments, and the call."""

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from rewards.base import said
from rollout.env.plain import as_text
from rollout.env.protocol import ToolSpec

MAX_SAID = 500  # characters of an exception's text that are worth showing to the policy


class ToolError(ValueError):
    """A function that cannot be a tool; the message says what it lacks."""


class BadCall(ValueError):
    """Arguments that do not fit the function; the message is for the policy."""


class ToolFailed(RuntimeError):
    """The function raised, took too long, or returned what has no text; the message is for the policy. Its cause: what
    the function raised."""


class FunctionTool:
    """A plain or async function that a policy may call.

    function: every parameter is annotated and described in the docstring (Google style), since the JSON schema that the
    chat template shows is made of them by transformers.utils.get_json_schema.

    Raises ToolError for a function of which no schema can be made.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self._function = function
        self.spec = _spec(function, self.name)
        self._arguments = _arguments(function, self.name)

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
            async with asyncio.timeout(timeout_s) as deadline:
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


def _spec(function: Callable[..., Any], name: str) -> ToolSpec:
    from transformers.utils.chat_template_utils import get_json_schema  # which loads torch

    try:
        spec: ToolSpec = get_json_schema(function)
    except Exception as error:  # of a function that nothing is known of
        raise ToolError(
            f"tool {name}: every parameter must have an annotation and a line in the docstring's Args section, so that "
            f"the model can be told how to call it; {said(error).rstrip('.!')}"
        ) from error
    spec["function"].pop("return", None)  # no chat template reads it
    return spec


def _arguments(function: Callable[..., Any], name: str) -> type[BaseModel]:
    """A model of the keyword arguments. Its fields have made-up names, since a parameter may be called as a method."""
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolError(f"tool {name}: parameters must be given by name, got {parameter}; name each")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"argument_{index}"] = (hints[parameter.name], Field(default, alias=parameter.name))
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except Exception as error:  # pydantic's own are of several kinds
        raise ToolError(f"tool {name}: annotations must be types that JSON can hold: {said(error)[:200]}") from error


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
