"""The README is short, and what it shows works as it stands there."""

import re
from pathlib import Path
from typing import Any

import yaml

from learner.config import RunConfig
from learner.tools.init import REWARD

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_it_is_an_overview() -> None:
    assert len(TEXT.splitlines()) <= 175


def test_its_configuration_is_one_that_the_program_accepts() -> None:
    (example,) = blocks("yaml")
    assert RunConfig.model_validate(yaml.safe_load(example)).num_steps == 200


def test_its_reward_function_scores() -> None:
    example = blocks("python")[0]
    assert example == REWARD  # which gleaner init writes
    names: dict[str, Any] = {}
    exec(example, names)
    completions = [[{"role": "assistant", "content": text}] for text in ("2 + 2 = 4", "it is 5", "no idea")]
    assert names["accuracy"](prompts=[""] * 3, completions=completions, answer=["4"] * 3) == [1.0, 0.0, 0.0]


def test_its_one_figure_of_speed_is_that_of_the_benchmarks() -> None:
    (figure,) = re.findall(r"gleaner makes ([\d.]+-[\d.]+ times)", TEXT)
    assert all(figure in (ROOT / "docs" / page).read_text() for page in ("benchmarks.md", "comparison.md"))
