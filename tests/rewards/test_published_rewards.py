"""The published recipe's reward functions, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rewards.loader import load

FILE = Path(__file__).parents[2] / "examples" / "gsm8k" / "published_rewards.py"
GOOD = "<reasoning>\n2 + 2 = 4\n</reasoning>\n<answer>\n4\n</answer>\n"
TEXTS = [
    GOOD,
    GOOD.rstrip("\n"),
    GOOD + "So 4.",
    "<reasoning>a</reasoning> <answer>four</answer>",
    "4",
    GOOD.replace("2 +", "2\n+"),
]


def scores(name: str) -> Any:
    reward: Any = load(f"{FILE}:{name}_reward_func")
    n = len(TEXTS)
    completions = [[{"role": "assistant", "content": text}] for text in TEXTS]
    return reward(prompts=[[]] * n, completions=completions, answer=["two and two\n#### 4"] * n)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("correctness", [2, 2, 2, 0, 2, 2]),
        ("int", [0.5, 0.5, 0.5, 0, 0.5, 0.5]),
        ("strict_format", [0.5, 0, 0, 0, 0, 0]),
        ("soft_format", [0, 0, 0, 0.5, 0, 0]),
        # Without the last line break "\n</answer>\n" is not there, so all 55 characters count as what follows it.
        ("xmlcount", [0.5, 0.5 - 0.055 + 0.001, 0.5 - 0.005 - 0.005, 0, 0, 0.5]),
    ],
)
def test_by_hand(name: str, wanted: list[float]) -> None:
    assert scores(name) == pytest.approx(wanted)
