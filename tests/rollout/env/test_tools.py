"""Whatever a call does, the policy is told in the order of its calls, and it is counted. What a model is told of a
tool is what its check takes.
"""

from __future__ import annotations

import asyncio
import enum
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from cluster.errors import WrongInput
from rollout.env.protocol import Step, ToolCall, Turn
from rollout.env.tools.functions import FunctionTool
from rollout.env.tools.python_tools import PythonTools
from rollout.schema import Problem

PROBLEM = Problem("p", ({"role": "user", "content": "2+3=?"},), {}, (), 0, 0)
NONE = {"bad_calls": 0, "tool_errors": 0, "cut_answers": 0}


def add(a: int, b: int = 1) -> int:
    """Adds.

    Args:
        a: a number
        b: another
    """
    return a + b


async def look_up(word: str, where: Literal["left", "right"]) -> dict[str, str]:
    """Looks up a word.

    Args:
        word: the word
        where: on which side
    """
    await asyncio.sleep(0)
    return {where: word}


def misbehave(how: str) -> Any:
    """Does what no tool should.

    Args:
        how: what
    """
    does: dict[str, Callable[[], Any]] = {
        "exit": lambda: exit(1),
        "hang": threading.Event().wait,
        "half": lambda: "\ud83d",
        "long": lambda: "x" * 201,
        "object": lambda: {1, 2}.__class__,
        "stop": lambda: next(iter(())),
        "timeout": lambda: (_ for _ in ()).throw(TimeoutError("the site's")),
    }
    return does[how]()


async def hang(cancel: bool) -> str:
    """Waits for ever, or cancels itself.

    Args:
        cancel: whether
    """
    if cancel:
        raise asyncio.CancelledError
    await asyncio.Event().wait()
    return ""


TOOLS = PythonTools([add, look_up, misbehave, hang], timeout_s=0.2, max_chars=200)


async def step(*calls: ToolCall, malformed: tuple[str, ...] = ()) -> Step:
    return await TOOLS.step(Turn("", (), calls, malformed))


def said(step: Step) -> list[str]:
    assert {message["role"] for message in step.messages} <= {"tool"}
    return [message["content"] for message in step.messages]


async def test_calls_are_answered_in_their_order() -> None:
    start = await TOOLS.reset(PROBLEM, 0)
    assert start.messages == PROBLEM.messages
    assert start.tools[0] == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "a number"},
                    "b": {"type": "integer", "description": "another"},
                },
                "required": ["a"],
            },
        },
    }
    calls = [
        ToolCall("look_up", {"word": "ü", "where": "left"}),
        ToolCall("add", {"a": 2, "b": 3}),
        ToolCall("add", {"a": 1}),
    ]
    seen = await step(*calls, malformed=("Tool call 4 could not be read.",))
    assert said(seen) == ['{"left": "ü"}', "5", "2", "Tool call 4 could not be read."]
    assert [message.get("name") for message in seen.messages] == ["look_up", "add", "add", None]
    assert not seen.done
    assert seen.metrics == NONE


async def test_a_turn_without_calls_is_the_last() -> None:
    assert await step() == Step(done=True, metrics=NONE)
    assert await TOOLS.score() == {}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (ToolCall("subtract", {}), "There is no tool 'subtract'; the tools are add, look_up, misbehave, hang."),
        (ToolCall("add", {"a": "2"}), "add was not called, .* wrong: a: Input should be a valid integer"),
        (ToolCall("add", {"b": 2, "c": 3}), "a: Field required; c: Extra inputs are not permitted"),
        (ToolCall("look_up", {"word": "x", "where": "up"}), "where: Input should be 'left' or 'right'"),
    ],
)
async def test_a_call_that_does_not_fit_is_said(call: ToolCall, sentence: str) -> None:
    seen = await step(call)
    assert re.search(sentence, said(seen)[0])
    assert seen.metrics == NONE | {"bad_calls": 1}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (ToolCall("misbehave", {"how": "exit"}), "misbehave failed: SystemExit: 1"),
        (ToolCall("misbehave", {"how": "hang"}), "misbehave was stopped after 0.2 s without an answer"),
        (ToolCall("misbehave", {"how": "timeout"}), "misbehave failed: TimeoutError: the site's"),
        (ToolCall("misbehave", {"how": "stop"}), "misbehave failed: RuntimeError: StopIteration"),
        (ToolCall("misbehave", {"how": "what"}), "misbehave failed: KeyError: 'what'"),
        (ToolCall("hang", {"cancel": False}), "hang was stopped after 0.2 s without an answer"),
        (ToolCall("hang", {"cancel": True}), "hang failed: it was cancelled"),
    ],
)
async def test_a_tool_that_fails_is_an_observation(call: ToolCall, sentence: str) -> None:
    seen = await step(call)
    assert said(seen) == [sentence]
    assert seen.metrics == NONE | {"tool_errors": 1}
    (told,) = seen.warnings.values()
    assert told.startswith("env: the tool " + call.name)


async def test_calls_beyond_the_turns_time_are_answered_without_being_called() -> None:
    """Else a policy could end a trajectory without a reward, by as many calls that never return as that takes."""
    called: list[int] = []

    def note(a: int) -> None:
        called.append(a)

    note.__doc__ = without_hint.__doc__
    tools = PythonTools([hang, note], timeout_s=0.2, turn_timeout_s=0.3)
    calls = [ToolCall("hang", {"cancel": False})] * 2 + [ToolCall("note", {"a": 1})] * 50
    seen = await tools.step(Turn("", (), tuple(calls)))
    first, second, *others = said(seen)
    assert first == "hang was stopped after 0.2 s without an answer"
    assert re.match(r"hang was stopped after 0\.[01]\d* s", second)
    assert set(others) == {"note was not called: the 0.3 s for the calls of a turn are over"}
    assert (len(others), called, seen.metrics["tool_errors"]) == (50, [], 52)


async def test_answers_are_text_that_a_tokenizer_takes() -> None:
    seen = await step(*(ToolCall("misbehave", {"how": how}) for how in ("half", "object", "long")))
    assert said(seen) == ["?", "\"<class 'set'>\"", "x" * 200 + "\n[cut: the first 200 of 201 characters]"]
    assert seen.metrics == NONE | {"cut_answers": 1}


async def test_the_first_failure_of_each_kind_is_for_the_log_with_its_place() -> None:
    seen = await step(*(ToolCall("misbehave", {"how": how}) for how in ("what", "how", "stop", "object")))
    assert list(seen.warnings) == ["misbehave: KeyError", "misbehave: RuntimeError"]
    told = seen.warnings["misbehave: KeyError"]
    wanted = r"env: the tool misbehave raised KeyError: 'what' \(test_tools.py, line \d+\); .* counts it"
    assert re.fullmatch(wanted, told)
    assert (await step()).warnings == {}


async def test_who_cancels_a_step_is_obeyed() -> None:
    task = asyncio.create_task(step(ToolCall("hang", {"cancel": False})))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def without_doc(a: int) -> int:
    return a


def without_hint(a):  # type: ignore[no-untyped-def]
    """Is untyped.

    Args:
        a: a number
    """
    return a


def open_ended(*a: int) -> int:
    """Takes any.

    Args:
        a: numbers
    """
    return sum(a)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([without_doc], "^tool without_doc: every parameter must .*; .* has no docstring"),
        ([without_hint], "^tool without_hint: every parameter must .*; Argument a is missing a type hint"),
        ([open_ended], r"^tool open_ended: parameters must be given by name, got \*a: int; name each"),
        ([add, add], "^tools: names must differ, got add, add; rename one"),
        ([], "^tools: must be at least one function"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(functions: list[Any], message: str) -> None:
    with pytest.raises(WrongInput, match=message):
        PythonTools(functions)


async def test_tools_are_named_as_reward_functions_are(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f'def twice(a: int) -> int:\n    """{add.__doc__}"""\n    return 2 * a\n')
    tools = PythonTools([f"{tmp_path}/mine.py:twice", "tests.rollout.env.test_tools:add"])
    seen = await tools.step(Turn("", (), (ToolCall("twice", {"a": 4}),)))
    assert said(seen) == ["8"]
    with pytest.raises(WrongInput, match=r"mine.py' names no function; write it .*mine\.py:my_tool; .* twice$"):
        PythonTools([f"{tmp_path}/mine.py"])


def test_a_forked_process_has_all_that_tools_need_loaded() -> None:
    code = (
        "import sys, rollout.env.host, rollout.env.tools.python_tools as tools; before = set(sys.modules); "
        "tools.PythonTools(['rollout.env.tools.calculator:calculator']); print(*sorted(set(sys.modules) - before))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in loaded if name.startswith(("torch", "transformers"))] == []  # seconds, a trajectory


# What a model is told of a tool is what its check takes.


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(BaseModel):
    title: str
    color: Color = Color.RED
    near: Place | None = None


class Town(BaseModel):
    title: str
    color: Color = Color.RED
    inhabitants: int | None = None


def paint(color: Color, towns: list[Town], day: date | None = None, more: dict[str, Any] | None = None) -> str:
    """Paints.

    Args:
        color: with which color
        towns: what
        day: when
        more: what else
    """
    return f"{color.name} {towns[0].title} {day} {more}"


def go(place: Place) -> None:
    """Goes.

    Args:
        place: where
    """


async def called(tool: FunctionTool, arguments: dict[str, Any]) -> str:
    given = tool.given(arguments)
    assert isinstance(given, dict)
    return await tool.call(given, 5)


async def test_enums_and_models_are_told_as_they_are_checked() -> None:
    tool = FunctionTool(paint)
    color = {"type": "string", "enum": ["red", "blue"]}
    town = {"title": {"type": "string"}, "color": color, "inhabitants": {"type": "integer", "nullable": True}}
    properties = tool.spec["function"]["parameters"]["properties"]
    assert properties == {
        "color": color | {"description": "with which color"},
        "towns": {
            "type": "array",
            "items": {"type": "object", "properties": town, "required": ["title"]},
            "description": "what",
        },
        "day": {"type": "string", "format": "date", "nullable": True, "description": "when"},
        "more": {"type": "object", "additionalProperties": {}, "nullable": True, "description": "what else"},
    }
    assert await called(tool, {"color": "blue", "towns": [{"title": "A", "color": "red"}]}) == "BLUE A None None"


def scale(number: int, by: int, plus: int = 0) -> int:
    """Scales.

    Args:
        number: what
        by: how much
        plus: what is added
    """
    return number * by + plus


class Adder:
    def __init__(self, more: int) -> None:
        self.more = more

    async def __call__(self, number: int) -> int:
        """Adds.

        Args:
            number: to what
        """
        return number + self.more


@pytest.mark.parametrize(
    ("function", "name", "asked", "answer"),
    [
        (partial(scale, by=3), "scale", ["number", "plus"], "6"),
        (partial(scale, 3, plus=1), "scale", ["by"], "7"),
        (Adder(5), "Adder", ["number"], "7"),
        (partial(Adder(5)), "Adder", ["number"], "7"),
    ],
)
async def test_what_a_partial_gives_itself_is_not_asked_for(
    function: Any, name: str, asked: list[str], answer: str
) -> None:
    tool = FunctionTool(function)
    assert (tool.name, tool.spec["function"]["name"]) == (name, name)
    assert list(tool.spec["function"]["parameters"]["properties"]) == asked
    assert await called(tool, {asked[0]: 2}) == answer


def lines(count: int) -> Iterator[int]:
    """Lines.

    Args:
        count: how many
    """
    yield count


async def later(count: int) -> AsyncIterator[int]:
    """Lines.

    Args:
        count: how many
    """
    yield count


def typed(count: int) -> int:
    """Counts.

    Args:
        count (int): how many
    """
    return count


def unknown(count: Nowhere) -> int:  # type: ignore[name-defined] # noqa: F821
    """Counts.

    Args:
        count: how many
    """
    return 0


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lines, "^tool lines: must return its answer, and yields; return a value, for example a list"),
        (later, "^tool later: must return its answer, and yields"),
        (typed, "^tool typed: .* a line `name: what it is` without its type, .* no description for the argument"),
        (unknown, "^tool unknown: annotations must be names of types that are there: name 'Nowhere' is not defined"),
        (go, "^tool go: annotations must be types that JSON has: Place holds itself, and"),
    ],
)
def test_what_cannot_be_told_is_refused(function: Any, sentence: str) -> None:
    with pytest.raises(WrongInput, match=sentence):
        FunctionTool(function)
