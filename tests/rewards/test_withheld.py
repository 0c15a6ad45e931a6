"""Addresses that a client of a reward function would miss are told before a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from rewards.call import Group
from rewards.check import withheld_notes
from rewards.config import RewardConfig
from rewards.pool import RewardPool

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


async def test_what_a_function_looks_for_in_a_run_is_told_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever it is looked for: its own code, a library, with a default or without."""
    for name in ("ACME_API_KEY", "ACME_BASE_URL", "OTHER_TOKEN", "ACME_COLOURS"):
        monkeypatch.setenv(name, "secret")
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "KEY = os.environ.get('ACME_API_KEY')\n"
        "def f(completions, **columns):\n"
        "    found = [os.getenv('ACME_BASE_URL', '-'), os.getenv('ACME_COLOURS'), 'OTHER_TOKEN' in os.environ]\n"
        "    return [float(found == ['-', None, False]), float(os.environ['PATH'] != '')]\n"
    )
    use = f"{tmp_path}/mine.py:f"
    async with RewardPool([RewardConfig(use=use), RewardConfig(use=use, name="given", env=("ACME_BASE_URL",))]) as pool:
        first = await pool.score(Group.of("?", ["a", "b"], [[0], [0]], {}))
        second = await pool.score(Group.of("?", ["a", "b"], [[0], [0]], {}))
    assert first.parts["f"] == [1.0, 1.0]
    told = [*first.asked.values()]
    assert [sentence.partition(", which")[0] for sentence in told] == [
        f"reward {name!r} looked for {variable}"
        for name, variable in (
            ("f", "ACME_API_KEY"), ("f", "ACME_BASE_URL"), ("f", "OTHER_TOKEN"), ("given", "OTHER_TOKEN"),
        )
    ]  # fmt: skip
    assert told[3].endswith("set its env=[ACME_BASE_URL, OTHER_TOKEN]")
    assert {(name, value) for name, value, _ in second.logged[0]} == {
        ("asked_for_ACME_BASE_URL", 1.0), ("asked_for_OTHER_TOKEN", 1.0),
    }  # fmt: skip
    assert "secret" not in repr((first, second))
