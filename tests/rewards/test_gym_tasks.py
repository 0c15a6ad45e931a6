"""One task of reasoning_gym without the others, and the whole package for whoever asks for it afterwards."""

import subprocess
import sys

import pytest

ONE = """
import sys
from rewards.built_in import reasoning_gym
made = reasoning_gym.task_factory("chain_sum").create_dataset("chain_sum", size=1, seed=1)[0]
assert made["metadata"]["source_dataset"] == "chain_sum"
print({"matplotlib", "sympy"} & set(sys.modules))
assert reasoning_gym.task_factory("no_such_task") is reasoning_gym.task_factory("chain_sum")
import reasoning_gym
from reasoning_gym import algorithmic
assert reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0] == made
print(len(reasoning_gym.factory.DATASETS) > 100, {"matplotlib", "sympy"} <= set(sys.modules))
"""


def test_a_task_comes_without_the_other_families_and_they_come_when_asked_for() -> None:
    pytest.importorskip("reasoning_gym")
    run = subprocess.run([sys.executable, "-c", ONE], capture_output=True, text=True)
    assert run.stdout.splitlines() == ["set()", "True True"], run.stderr
