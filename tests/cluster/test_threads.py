"""Commands that compute in their own process: by OpenMP's own words, as it is loaded, its threads sleep while they
wait."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Each fails by what is not there, and torch is loaded only then.
COMMANDS = {
    "export": ["export", "nowhere", "out"],
    "reward-model": ["reward-model", "train", "nowhere.jsonl", "--model", "nowhere", "--out", "/proc/x"],
}
CALL = "import sys; from learner.tools.cli import main; code = main(sys.argv[1:]); import torch; sys.exit(code)"


def said(words: list[str], **environment: str) -> list[str]:
    """What OpenMP says of its settings in the process of a command."""
    told = subprocess.run(
        [sys.executable, "-c", CALL, *words], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "OMP_DISPLAY_ENV": "true", **environment},
    )  # fmt: skip
    assert told.returncode == 2, told.stderr
    return [line.strip() for line in told.stderr.splitlines() if " OMP_" in line]


@pytest.mark.parametrize("command", COMMANDS)
def test_threads_sleep_while_they_wait(command: str) -> None:
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in said(COMMANDS[command])


def test_what_the_user_says_of_the_waiting_stays() -> None:
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in said(COMMANDS["export"], OMP_WAIT_POLICY="ACTIVE")
