"""ms-swift's classes, unchanged and by their names, say what they say when they are called: `make test-others`."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.others.asked import asked, group_of, same

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("swift") is None, reason="make test-others installs ms-swift"),
    pytest.mark.filterwarnings("ignore"),  # that library's own
]
TEXTS = [
    r"<think>9 + 3</think> <answer>\boxed{12}</answer>",
    "<think>9 + 3</think><answer>13</answer>",
    r"It is \boxed{12}.",
    "<think>look</think> Action: add Action Input: {}",
    "",
    r"<answer> \boxed{ \ud7ff",
]


async def test_values_are_those_of_direct_calls() -> None:
    import swift.rewards.orm as orm

    names = ["MathAccuracy", "Format", "ReActFormat"]
    group = group_of(TEXTS, solution=r"\boxed{12}")
    found = await asked({f"swift.rewards.orm:{name}": {} for name in names}, [group])
    for name in names:
        theirs: Any = getattr(orm, name)()
        wanted = theirs(completions=TEXTS, solution=group.columns["solution"])
        assert same(found[f"swift.rewards.orm:{name}"], [wanted]), name
        assert len(set(wanted)) > 1, name
