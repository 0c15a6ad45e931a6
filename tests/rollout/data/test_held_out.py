"""Which problems are held out of training, and what is said where they cannot be."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import WrongInput
from rollout.config import DataConfig, EvalConfig
from rollout.data import sources
from rollout.data.chat import Messages, Prompt
from rollout.data.problems import load


class Letters:
    """The text's bytes as token ids; texts that begin with `slow` take 0.02 s by `self.now`, a clock of its own."""

    def __init__(self, slow: str = "?") -> None:
        self._slow = slow
        self.now = 0.0

    def render(self, messages: Messages) -> tuple[Prompt, tuple[int, ...]]:
        text = messages[-1]["content"]
        if text.startswith(self._slow):
            self.now += 0.02
        return tuple(map(dict, messages)), tuple(text.encode())

    def count(self, text: str) -> int:
        return len(text.encode())


def jsonl(file: Path, questions: Sequence[str]) -> str:
    file.write_text("".join(json.dumps({"question": question}) + "\n" for question in questions))
    return str(file)


def config(path: str, /, **eval_: Any) -> DataConfig:
    return DataConfig(path=path, eval=EvalConfig(**eval_))


def test_a_prompt_that_training_repeats_stays_repeated(tmp_path: Path) -> None:
    """A tenth of the twenty different ones is held out, each of which is there three times."""
    problems, held_out = load(config(jsonl(tmp_path / "a.jsonl", [f"q{i // 3}" for i in range(60)])), Letters(), 99, 0)
    assert (len(problems), len(held_out)) == (54, 2)


def test_arguments_are_those_of_their_path(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question;answer\na;1\n")
    data = config(str(tmp_path / "a.csv"), path=jsonl(tmp_path / "b.jsonl", ["b"]))
    _, (held_out,) = load(data.model_copy(update={"args": {"sep": ";"}}), Letters(), 99, 0)
    assert held_out.columns == {"question": "b"}


@pytest.mark.parametrize(("slow", "key"), [("train", r"data\.size"), ("held", r"data\.eval\.size")])
def test_the_problems_that_take_too_long_are_named(
    slow: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = Letters(slow)
    monkeypatch.setattr(sources, "time", SimpleNamespace(monotonic=lambda: letters.now))
    train, held = (jsonl(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(900)]) for name in ("train", "held"))
    with pytest.raises(WrongInput, match=f"^{key}: tokenising .* took .*; lower {key}$"):
        load(config(train, path=held), letters, 99, 0, deadline_s=2)
