"""Addresses that a client of a reward function would miss are told before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewards.config import RewardConfig
from rewards.withheld import withheld_notes

HERE = {
    "OPENAI_BASE_URL": "http://127.0.0.1:9", "AZURE_OPENAI_ENDPOINT": "x", "OLLAMA_HOST": "x", "https_proxy": "x",
    "HF_ENDPOINT": "x", "PATH": "/bin", "OPENAI_API_KEY": "secret", "MY_JUDGE_URL": "x", "HOST": "x", "CI_HOST": "x",
}  # fmt: skip


def told(folder: Path, text: str, *env: str, helper: str = "") -> list[str]:
    (folder / "mine.py").write_text(text)
    (folder / "helper.py").write_text(helper)
    notes = withheld_notes(RewardConfig(use=f"{folder}/mine.py:f", env=env), "rewards.0", HERE)
    assert "secret" not in "".join(notes)
    assert all(f"set env=[{', '.join([*env, ''])}" in note for note in notes)
    return [note.removeprefix("rewards.0: ").partition(" ")[0] for note in notes]


@pytest.mark.parametrize(
    ("text", "env", "names"),
    [
        ("import openai", (), ["OPENAI_BASE_URL", "https_proxy"]),
        ("def f(completions): return []", ("OPENAI_API_KEY",), ["OPENAI_BASE_URL", "https_proxy"]),
        ("from openai import OpenAI", ("OPENAI_BASE_URL", "https_proxy"), []),
        ("import os; url = os.environ['MY_JUDGE_URL']", (), ["MY_JUDGE_URL"]),
        ("import ollama", (), ["OLLAMA_HOST"]),
        ("import httpx", (), ["https_proxy"]),
        ("def f(completions): return [len(c) for c in completions]", (), []),
    ],
)
def test_what_a_client_would_read(tmp_path: Path, text: str, env: tuple[str, ...], names: list[str]) -> None:
    assert told(tmp_path, text, *env) == names


def test_files_beside_it_count_and_what_is_no_file_does_not(tmp_path: Path) -> None:
    assert told(tmp_path, "import helper", helper="import openai") == ["OPENAI_BASE_URL", "https_proxy"]
    for use in ("number", "package.module:f", f"{tmp_path}/absent.py:f"):
        assert withheld_notes(RewardConfig(use=use), "rewards.0", HERE) == []
