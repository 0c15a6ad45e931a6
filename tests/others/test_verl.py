"""verl's graders, unchanged and by their names, say what they say when they are called: `make test-others`."""

from __future__ import annotations

import importlib
import importlib.util
import json
from typing import Any

import pytest

from tests.others.asked import asked, each, group_of, same

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="make test-others installs verl"),
    pytest.mark.filterwarnings("ignore"),  # that library's own
]
TEXTS = [
    "9 + 3 = 12\n#### 12",
    r"So it is $\boxed{12}$.",
    "<think>9 + 3</think> <answer>12</answer>",
    "Answer: 12",
    r"#### 13 \boxed{13} <answer>13</answer> Answer: 13",
    "",
    r"#### \boxed{ <answer>",
    "twelve \ud7ff",
]
GRADERS = ["gsm8k", "math_reward", "math_dapo", "geo3k", "prime_math"]
CODE = [
    "```python\nprint(int(input()) + 1)\n```",
    "```python\nprint(int(input()))\n```",
    "no code",
    "",
]


def grader(module: str, name: str = "compute_score") -> tuple[str, Any]:
    """Its `use`, and itself."""
    place = f"verl.utils.reward_score.{module}".rstrip(".")
    return f"{place}:{name}", getattr(importlib.import_module(place), name)


async def test_values_are_those_of_direct_calls() -> None:
    uses = dict(map(grader, GRADERS))
    found = await asked({use: {} for use in uses}, [group_of(TEXTS, ground_truth="12")])
    for use, function in uses.items():
        wanted = each(function, TEXTS, ground_truth="12")
        assert same(found[use], [wanted]), use
        assert len(set(wanted)) > 1, use


async def test_rows_in_verls_form_go_to_the_grader_of_their_source() -> None:
    use, function = grader("", "default_compute_score")
    sources = {"openai/gsm8k": "12", "math_dapo": "12", "lighteval/MATH": "12", "searchR1_nq": {"target": ["12", "a"]}}
    groups = [
        group_of(TEXTS, data_source=source, reward_model={"style": "rule", "ground_truth": gold}, extra_info={"i": 0})
        for source, gold in sources.items()
    ]
    found = await asked({use: {}}, groups)
    wanted = [
        each(lambda text, of, gold: function(of, text, gold), TEXTS, of=source, gold=gold)
        for source, gold in sources.items()
    ]
    assert same(found[use], wanted)
    assert all(len(set(one)) > 1 for one in wanted)


async def test_a_whole_group_and_a_dict_as_gold_answer() -> None:
    batched, of_group = grader("math_batch", "compute_score_batched")
    search, of_one = grader("search_r1_like_qa_em")
    gold = {"target": ["Twelve", "12"]}
    of_texts, of_rows = group_of(TEXTS, answer="12"), group_of(TEXTS, ground_truth=gold)
    found = [(await asked({use: {}}, [one]))[use] for use, one in ((batched, of_texts), (search, of_rows))]
    size = len(TEXTS)
    assert same(found[0], [of_group([""] * size, TEXTS, ["12"] * size, [{}] * size)])
    assert same(found[1], [each(of_one, TEXTS, ground_truth=gold)])


async def test_code_is_run_by_verls_own_means() -> None:
    use, function = grader("prime_code")
    cases = json.dumps({"inputs": ["1\n", "5\n"], "outputs": ["2\n", "6\n"]})
    found = await asked({use: {"continuous": True}}, [group_of(CODE, test_cases=cases)])
    wanted = each(function, CODE, test_cases=cases, continuous=True)
    assert same(found[use], [wanted])
    assert wanted[:2] == [1.0, 0.0]
