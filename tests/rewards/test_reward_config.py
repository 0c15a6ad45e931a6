"""Configuration: strict at the door, unique names, and light to import."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from rewards.config import RewardConfig, resolved_names


@pytest.mark.parametrize(
    "bad",
    [{"weight": float("nan")}, {"timeout_s": 0}, {"on_error": "zero"}, {"wieght": 1}, {"use": ""}, {"use": "adapter:"}],
)
def test_bad_values_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(bad))):
        RewardConfig(**{"use": "number", **bad})


def test_a_name_alone_is_a_reward() -> None:
    assert RewardConfig.model_validate("my.py:accuracy") == RewardConfig(use="my.py:accuracy")


def test_names_are_short_and_unique() -> None:
    uses = ["number", "a.py:acc", "pkg.mod:acc", "b.py:acc"]
    rewards = [RewardConfig(use=use) for use in uses] + [RewardConfig(use="number", name="acc_2")]
    assert resolved_names(rewards) == ["number", "acc", "acc_2", "acc_3", "acc_2_2"]


def test_config_imports_nothing_heavy() -> None:
    code = (
        "import sys, rewards.config; print([m for m in sys.modules if m.split('.')[0] in {'pebble','numpy','torch'}])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
