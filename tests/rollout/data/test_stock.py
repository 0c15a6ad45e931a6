"""What is known of prompts before each is tokenised: never other than what tokenising all of them says."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers

from cluster.errors import WrongInput
from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tokenizer
from learner.config import RunConfig
from learner.driver.identity import fingerprints_of
from rollout.config import DataConfig, EvalConfig
from rollout.data import problems as stock
from rollout.data.chat import Chat, Messages, Prompt
from rollout.data.problems import load

WORDS = [
    "plus",
    "What",
    "is",
    "\u00e9",
    "\ufdfa",
    "q" * 40,
    "1+1",
    "\u2028",
    "a\tb",
    "\uff21\uff22",
    "\u2026" * 9,
    "<|im_end|>",
    "stra\u00dfe",
    "42",
]


class Counting(Chat):
    rendered = 0

    def render(self, messages: Messages, tools: Any = ()) -> tuple[Prompt, tuple[int, ...]]:
        self.rendered += 1
        return super().render(messages, tools)


def chat(kind: str) -> Counting:
    tokenizer: Any = make_tokenizer()
    if kind == "plain":
        tokenizer.chat_template = None
    if kind == "lower":
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    if kind == "digits":  # texts that differ in more than letter case and white space are one prompt
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace(Regex("[0-9]"), "0")
    if kind == "longer":  # a word has more tokens than bytes
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace("q", "?!" * 9)
    return Counting(tokenizer, EOS_IDS, VOCAB_SIZE)


def rows() -> list[dict[str, str]]:
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + f" {i % 90}" for i in range(150)]
    alike = [change(text) for text in texts[:40] for change in (str.upper, lambda text: text.replace(" ", "  "), str)]
    return [{"question": text} for text in ["1 or", "2 or", *texts, *alike]]


@pytest.mark.parametrize("system", [None, "Answer with a number."])
@pytest.mark.parametrize("kind", ["chat", "plain", "lower", "digits", "longer"])
def test_the_same_problems_as_if_all_had_been_tokenised(
    kind: str, system: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which fit, which are held out, and which of these are in training as well."""
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    data = DataConfig(path=str(file), overlong="drop", system=system, eval=EvalConfig(size=9))
    found = []
    for first in (20, 10**9):
        monkeypatch.setattr(stock, "FIRST", first)
        problems, held_out = load(data, chat(kind), 70, seed=3)
        found.append(([problems.at(place) for place in range(len(problems))], held_out))
    assert found[0] == found[1]
    fitting, held_out = found[0]
    assert 50 < len(fitting) < 272 - 9
    assert {problem.prompt_ids for problem in fitting}.isdisjoint(problem.prompt_ids for problem in held_out)


def test_short_prompts_are_tokenised_as_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stock, "FIRST", 20)
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"question": f"What is {i} plus {i}?"}) + "\n" for i in range(500)))
    counting = chat("chat")
    problems, held_out = load(DataConfig(path=str(file), eval=EvalConfig(size=9)), counting, 256, seed=0)
    assert (len(problems), len(held_out)) == (491, 9)
    assert counting.rendered < 50


def test_a_prompt_that_is_longer_than_was_held_to_be_ends_by_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompts told nothing of a word that this tokenizer makes many tokens of."""
    monkeypatch.setattr(stock, "FIRST", 20)
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"question": "q" if i == 90 else "a"}) + "\n" for i in range(91)))
    problems, _ = load(DataConfig(path=str(file), eval=EvalConfig(every=0)), chat("longer"), 25, seed=0)
    with pytest.raises(WrongInput, match=r"^rollout.max_prompt_length: .* into 25 tokens, and train-90 has \d\d"):
        [problems.at(place) for place in range(len(problems))]


def test_rows_have_the_digest_that_older_runs_recorded(tmp_path: Path) -> None:
    """As they were read by 5cd265e, from a list; else none of its runs would go on."""
    config = RunConfig.model_validate(
        {"model": {"path": str(tmp_path)}, "data": {"path": "d"}, "rewards": [{"use": "format"}]}
    )
    content = [{"b": 1.5, "a": "\u00e9", "c": [None, {"z": 10**30}]}, {"a": "2024-01-05"}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    problems, _ = load(DataConfig(path=str(file), prompt="a", eval=EvalConfig(every=0)), chat("chat"), 256, seed=0)
    assert fingerprints_of(config, problems.rows()).data == {
        "number of rows": "2",
        "rows": "5196fb95a4aa5597c62f0f010ac3c5a17350cdd781d2f2c2084f6058221e5a54",
    }
