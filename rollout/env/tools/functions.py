"""Python functions as tools: what the chat template is told of them, the check of arguments, and the calls."""

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from cluster.actor import within
from cluster.errors import WrongInput
from rewards.base import said
from rewards.limits import OF_ENVIRONMENTS, described
from rollout.env.protocol import Message, Step, ToolCall, ToolSpec, Turn, as_text
from rollout.env.tools.parser import MAX_NAME

# What the chat template is told of a Python function, and the check of the arguments that a policy gives it.


_LEFT_OUT = ("title", "default", "discriminator")  # of pydantic's; transformers has none of them either


def named(function: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
    """The name of a tool, and the function as its schema shows it: of a functools.partial without what it gives itself,
    of an object its __call__. Raises WrongInput for a generator."""
    inner = function.func if isinstance(function, partial) else function
    code: Callable[..., Any] = inner if hasattr(inner, "__name__") else type(inner).__call__.__get__(inner)
    name = str(getattr(function, "__name__", getattr(inner, "__name__", type(inner).__name__)))
    if inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code):
        raise WrongInput(f"tool {name}: must return its answer, and yields; return a value, for example a list")
    if code is function:
        return name, function

    def shown() -> None: ...

    given = function.keywords if isinstance(function, partial) else {}
    signature = inspect.signature(partial(inner, *function.args) if isinstance(function, partial) else code)
    asked = {key: parameter for key, parameter in signature.parameters.items() if key not in given}
    hints = _hints(code, name)
    shown.__name__, shown.__doc__ = name, inspect.getdoc(code)
    shown.__annotations__ = {key: hints[key] for key in asked if key in hints}
    shown.__signature__ = signature.replace(parameters=[*asked.values()])  # type: ignore[attr-defined]
    return name, shown


def spec_of(function: Callable[..., Any], name: str, arguments: type[BaseModel]) -> ToolSpec:
    """Its schema as transformers makes it, as in TRL; with pydantic's, which `arguments` has, where transformers knows
    no more of a type than that it is an object: an enum is none, and a model has fields. Raises WrongInput."""
    from transformers.utils.chat_template_utils import get_json_schema  # which loads torch

    try:
        spec: ToolSpec = get_json_schema(function)
    except Exception as error:  # of a function that nothing is known of
        raise WrongInput(
            f"tool {name}: every parameter must have an annotation, and in the docstring, below a line `Args:`, a line "
            "`name: what it is` without its type, so that the model can be told how to call it; "
            f"{said(error).rstrip('.!')}"
        ) from error
    spec["function"].pop("return", None)  # no chat template reads it
    properties = spec["function"]["parameters"]["properties"]
    if vague := [key for key, schema in properties.items() if _is_vague(schema)]:
        try:
            whole = arguments.model_json_schema()
            for key in vague:
                told = _inlined(whole["properties"][key], whole.get("$defs", {}))
                properties[key] = told | {"description": properties[key]["description"]}
        except Exception as error:  # pydantic's own are of several kinds
            raise WrongInput(f"tool {name}: annotations must be types that JSON has: {said(error)[:200]}") from error
    return spec


def arguments_of(function: Callable[..., Any], name: str) -> type[BaseModel]:
    """A model of the keyword arguments. Its fields have made-up names, since a parameter may be called as a method.
    Raises WrongInput."""
    hints = _hints(function, name)
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            written = parameter.replace(annotation=hints.get(parameter.name, parameter.annotation))
            raise WrongInput(f"tool {name}: parameters must be given by name, got {written}; name each")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[f"argument_{index}"] = (hints.get(parameter.name, Any), Field(default, alias=parameter.name))
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except Exception as error:  # pydantic's own are of several kinds
        raise WrongInput(f"tool {name}: annotations must be types that JSON can hold: {said(error)[:200]}") from error


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:  # evaluating them runs code
        raise WrongInput(f"tool {name}: annotations must be names of types that are there: {said(error)}") from error


def _is_vague(schema: Any) -> bool:
    """Whether it, or a part of it, is an object of which nothing is known."""
    if isinstance(schema, list):
        return any(map(_is_vague, schema))
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type", ())
    here = (kinds == "object" or "object" in kinds) and "additionalProperties" not in schema
    return here or any(map(_is_vague, schema.values()))


def _inlined(schema: Mapping[str, Any], named: Mapping[str, Any], within: tuple[str, ...] = ()) -> dict[str, Any]:
    """A schema of pydantic's without references, which chat templates do not follow, and as transformers writes it."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in within:
            raise WrongInput(f"{name} holds itself, and a tool's schema must come to an end")
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        return _inlined({**named[name], **rest}, named, (*within, name))
    told: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            told[key] = {name: _inlined(one, named, within) for name, one in value.items()}
        elif isinstance(value, Mapping) and key not in _LEFT_OUT:
            told[key] = _inlined(value, named, within)
        elif isinstance(value, list):
            told[key] = [_inlined(one, named, within) if isinstance(one, Mapping) else one for one in value]
        elif key not in _LEFT_OUT and (key, value) != ("additionalProperties", True):
            told[key] = value
    others = [one for one in told.get("anyOf", ()) if one != {"type": "null"}]
    if "anyOf" in told and len(others) == 1:
        del told["anyOf"]
        return {**others[0], **told, "nullable": True}
    return told


# One Python function as a tool: its schema for the chat template, the check of arguments, and the call.

MAX_SAID = 500  # characters of an exception's text that are worth showing to the policy


class ToolFailed(RuntimeError):
    """The function raised, took too long, or returned what has no text; the message is for the policy. Its cause: what
    the function raised. Answering gives it to the policy, warns of it, and counts it as env/tool_errors."""


class FunctionTool:
    """A plain or async function that a policy may call.

    function: every parameter is annotated and described in the docstring (Google style, without types), since the JSON
    schema that the chat template shows is made of them.

    Raises WrongInput for a function of which no schema can be made.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name, shown = named(function)
        self._function = function
        self._arguments = arguments_of(shown, self.name)
        self.spec = spec_of(shown, self.name, self._arguments)

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        """What the function is called with; a sentence for the policy where the arguments do not fit it."""
        try:
            checked = self._arguments.model_validate_json(json.dumps(arguments), strict=True)
        except RecursionError:
            return f"{self.name} was not called, since its arguments are nested too deeply"
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:5])
            return f"{self.name} was not called, since its arguments are wrong: {wrong}"
        return {
            str(field.alias): getattr(checked, name)
            for name, field in type(checked).model_fields.items()
            if name in checked.model_fields_set
        }

    async def call(self, given: Mapping[str, Any], timeout_s: float) -> str:
        """The function's answer as text: a string as it is, all else as JSON. given: of the method of that name.

        An async function runs in this event loop and is cancelled when its time is over. A plain one runs in a thread,
        which goes on until the process ends: no thread can be stopped from outside.

        Raises ToolFailed.
        """
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


# The calls of a turn, answered in their order within the turn's time.


@dataclass(frozen=True, slots=True)
class CallLimits:
    """timeout_s: seconds for one call. turn_timeout_s: for all calls of a turn together; must be below
    env.step_timeout_s, beyond which the trajectory would end without a reward. max_chars: of an answer."""

    timeout_s: float
    turn_timeout_s: float
    max_chars: int

    def __post_init__(self) -> None:
        if min(self.timeout_s, self.turn_timeout_s) <= 0 or self.max_chars < 1:
            raise WrongInput(
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
            answer, called = await self._call(call, left_s)
            if not called:
                counts["bad_calls"] += 1
                answer = self._error(answer)
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

    async def _call(self, call: ToolCall, left_s: float) -> tuple[str, bool]:
        """The answer, or, where no tool was called, why: there is none of that name, or the arguments do not fit."""
        if call.name not in self._tools:
            return self._no_tool(call.name[:MAX_NAME]), False
        if left_s <= 0:
            seconds = self._limits.turn_timeout_s
            raise ToolFailed(f"{call.name} was not called: the {seconds:g} s for the calls of a turn are over")
        tool = self._tools[call.name]
        given = tool.given(call.arguments)
        if isinstance(given, str):
            return given, False
        return await tool.call(given, min(self._limits.timeout_s, left_s)), True


def _warning(tool: str, error: ToolFailed) -> str:
    cause = error.__cause__
    told = f"{tool} raised {described(cause, OF_ENVIRONMENTS)}" if cause is not None else str(error)
    return as_text(f"env: the tool {told}; the policy is answered so, and env/tool_errors counts it")
