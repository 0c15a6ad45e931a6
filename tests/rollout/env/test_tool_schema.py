"""What a model is told of a tool is what its check takes."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Iterator
from datetime import date
from functools import partial
from typing import Any

import pytest
from pydantic import BaseModel

from cluster.errors import WrongInput
from rollout.env.tools.functions import FunctionTool


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
    assert await tool.call({"color": "blue", "towns": [{"title": "A", "color": "red"}]}, 5) == "BLUE A None None"


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
    assert await tool.call({asked[0]: 2}, 5) == answer


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
