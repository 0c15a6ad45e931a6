"""TRL's reward functions, unchanged and by their names, say what they say when they are called: `make test-others`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from rewards.loader import load
from tests.others.asked import asked, group_of, same

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="make test-others installs trl"),
    pytest.mark.filterwarnings("ignore"),  # that library's own
]
HERE = Path(__file__).parent
FACTORIES = ("overlong", "repetition", "trigrams", "cosine", "bounded")
THIRD = r"\frac{1}{3}"
TEXTS = [
    rf"<think>\n1 of 3\n</think>\nSo \boxed{{{THIRD}}}",  # right, in TRL's form
    rf"<think>\n{THIRD}\n</think>\nSo \boxed{{{THIRD.replace('3', '2')}}}",  # wrong
    rf"It is \boxed{{{THIRD}}}, without thinking",
    rf"<think> \boxed{{{THIRD}}} and no end",
    f"<|begin|> {THIRD} <|end|> 0.333",
    "</think> one third",
    "<think>a</think><think>b</think> the same words the same words the same words",
    "a b c d e f g h i j k l",
    "a b c d e f g h",  # between the limit of length and what is punished
    "x x x x x x",
    "one two",
    "",
    "\ud7ff \\boxed{",
]
GOLDS = [THIRD, rf"The answer is \boxed{{{THIRD}}}.", "no mathematics at all", "12"]


async def test_values_are_those_of_direct_calls() -> None:
    """Formats, lengths, repetitions, accuracy with golds that can and that cannot be read."""
    import trl.rewards

    delimiters: dict[str, Any] = {"reasoning_delimiters": ["<|end|>", "</think>"]}
    uses: dict[str, dict[str, Any]] = {
        "trl.rewards:think_format_reward": {},
        "trl.rewards:accuracy_reward": {},
        "trl.rewards:reasoning_accuracy_reward": delimiters,
        **{f"{HERE}/factories.py:{name}": {} for name in FACTORIES},
    }
    groups = [group_of(TEXTS, solution=gold) for gold in GOLDS]
    found = await asked(uses, groups)
    for use, args in uses.items():
        name = use.rpartition(":")[2]
        function: Any = getattr(trl.rewards, name) if name not in FACTORIES else load(use)
        wanted = [
            function(completions=one.completions, completion_ids=one.completion_ids, **one.columns, **args)
            for one in groups
        ]
        assert same(found[use], wanted), use
        assert len({value for group in wanted for value in group}) > 1, use
    of_accuracy = found["trl.rewards:accuracy_reward"]
    assert of_accuracy[0][:3] == [1.0, 0.0, 1.0]
    assert of_accuracy[2] == [None] * len(TEXTS)  # its gold cannot be read
    assert found["trl.rewards:think_format_reward"][0][:4] == [1.0, 1.0, 0.0, 0.0]


def test_a_factory_that_refuses_its_setting_is_told() -> None:
    with pytest.raises(WrongInput, match=r"refusing.py does not import: ValueError: max_penalty 0.5 should not"):
        load(f"{HERE}/refusing.py:repetition")
