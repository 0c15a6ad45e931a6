"""A sequence-classification model as a reward function, in its process, against transformers one row at a time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from examples.random_model import make_tiny_model, make_tokenizer
from learner.config import ModelConfig, RunConfig
from learner.driver.machine_checks import classifier_notes
from rewards.base import RewardError
from rewards.built_in.sequence_classifier import (
    _encoded,
    _load,
    prepare,
    sequence_classifier,
)
from rewards.call import Group, Verdict, score
from rewards.config import RewardConfig
from rewards.pool import RewardPool
from rollout.config import DataConfig, RolloutConfig
from tests.rollout.data.test_model_files import (
    Change,
    changed,
    having,
    without,
)

PROMPT = [{"role": "user", "content": "1+1?"}]
TEXTS = ["2", "it is three, I think", "", "no"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("base") / "model")


def classifier(base: Path, folder: Path, outputs: int, pad: int | None = 259, *, template: bool = True) -> str:
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=outputs, dtype=torch.float32)
    model.config.pad_token_id = pad
    model.save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    if not template:
        tokenizer.chat_template = None
        # Between the two texts and behind them, as most encoders' tokenizers have it.
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A", pair="$A:0 <|end|>:1 $B:1 <|end|>:1", special_tokens=[("<|end|>", 258)]
        )
    tokenizer.save_pretrained(folder)
    return str(folder)


async def test_a_card_that_is_not_there_is_one_sentence(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device of a reward process reaches the model in it; without it, the model stays in main memory."""
    path = classifier(base, tmp_path / "model", 1)
    monkeypatch.setenv("GLEANER_REWARD_DEVICE", "cuda:99")
    async with RewardPool([RewardConfig(use="sequence_classifier", args={"model": path}, timeout_s=60)]) as pool:
        (verdict,) = await pool.verdicts(Group([PROMPT], [[{"role": "assistant", "content": "2"}]], [[1]], {}))
    assert verdict.status == "error"
    assert verdict.problem.startswith(f"args.model: {path} cannot be put on the card of its process (")


def wanted(path: str, output: int) -> list[float]:
    model: Any = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model.eval()
    scores = []
    for text in TEXTS:
        ids = tokenizer.apply_chat_template([*PROMPT, {"role": "assistant", "content": text}], return_dict=False)
        with torch.no_grad():
            scores.append(float(model(input_ids=torch.tensor([ids])).logits[0, output]))
    return scores


def configured(path: str, **args: Any) -> RewardConfig:
    return RewardConfig(use="sequence_classifier", args={"model": path, **args}, timeout_s=30)


def case() -> Group:
    return Group.of(PROMPT, TEXTS, [[0]] * 4, {})


def test_scores_are_transformers(base: Path, tmp_path: Path) -> None:
    """With the tokenizer's padding token and with another, and of one of three outputs without any."""
    models = [
        (classifier(base, tmp_path / "own", 1, 259), {"batch": 3}),
        (classifier(base, tmp_path / "other", 1, 5), {"batch": 4}),
        (classifier(base, tmp_path / "none", 3, None), {"output": 2}),
    ]

    async def main() -> list[float | None]:
        async with RewardPool([configured(path, **args) for path, args in models]) as pool:
            return (await pool.score(case())).reward

    each = [wanted(path, args.get("output", 0)) for path, args in models]
    assert asyncio.run(main()) == pytest.approx([sum(scores) for scores in zip(*each, strict=True)], abs=1e-5)


def said(path: str, prompt: Any, completions: Sequence[Any]) -> Verdict:
    many = len(completions)
    group = Group([prompt] * many, completions, completion_ids=[[0]] * many, columns={})
    return score(sequence_classifier, group, {"model": path}, built_in=True)


def test_a_text_is_a_user_s_message_and_without_a_template_both_are_a_pair(base: Path, tmp_path: Path) -> None:
    with_template = classifier(base, tmp_path / "chat", 1)
    assert said(with_template, "1+1?", TEXTS).values == pytest.approx(wanted(with_template, 0), abs=1e-5)
    path = classifier(base, tmp_path / "pairs", 1, template=False)
    model: Any = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    ids = [[*tokenizer.encode("1+1?"), 258, *tokenizer.encode(text), 258] for text in TEXTS]
    with torch.no_grad():
        alone = [float(model.eval()(input_ids=torch.tensor([one])).logits[0, 0]) for one in ids]
    assert said(path, PROMPT, case().completions).values == pytest.approx(alone, abs=1e-5)
    assert said(path, "1+1?", TEXTS).values == pytest.approx(alone, abs=1e-5)


def test_a_call_of_a_tool_is_read_once_as_it_was_written() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"
    turn = {"role": "assistant", "content": "<tool_call>f</tool_call>"}
    called = {**turn, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    assert _encoded(tokenizer, "1+1?", [called]) == _encoded(tokenizer, "1+1?", [turn])


def test_what_is_too_long_costs_itself_alone(base: Path, tmp_path: Path) -> None:
    path = classifier(base, tmp_path, 1)
    config = RunConfig(
        model=ModelConfig(path="m"), data=DataConfig(path="d"), rewards=[configured(path)],
        rollout=RolloutConfig(max_prompt_length=1000, max_completion_length=5000),
    )  # fmt: skip
    (note,) = classifier_notes(config)
    most = AutoConfig.from_pretrained(path).max_position_embeddings
    assert f"reads {most} tokens, prompt and completion may have 6000" in note
    verdict = said(path, "1+1?", ["2", "2" * most])
    assert verdict.status == "nan"
    assert verdict.values == pytest.approx([wanted(path, 0)[0], math.nan], abs=1e-5, nan_ok=True)


def test_what_gives_no_one_number_is_refused(base: Path, tmp_path: Path) -> None:
    two = classifier(base, tmp_path, outputs=2)
    for model, output, message in (
        (two, None, r"^args.output: must be one of 0 to 1, the outputs of .*, got None; choose one"),
        (two, 2, "^args.output: must be one of 0 to 1, .*got 2"),
        (str(base), 0, r"^args.model: .* lacks weights \(score.weight\), so its scores would be random"),
        ("/nope", None, "^args.model: /nope is no sequence-classification model"),
    ):
        with pytest.raises(RewardError, match=message):
            prepare(model=model, output=output)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), r"lacks weights \(model.layers.1.mlp.up_proj.weight\), so its"),
        (
            having(model__layers__5__mlp__up_proj__weight=torch.ones(2)),
            r"has no place for \(model.layers.5.mlp.up_proj",
        ),
        (
            having(score__weight=torch.ones(1, 7)),
            r"has weights in another shape than its config.json says \(score.weigh",
        ),
        (
            having(model__norm__weight=torch.full((64,), torch.inf)),
            r"are not finite numbers \(model.norm.weight\); give",
        ),
    ],
)
def test_weights_that_are_made_up_left_out_or_no_numbers_are_named(
    base: Path, tmp_path: Path, change: Change, message: str
) -> None:
    path = classifier(base, tmp_path, 1)
    changed(tmp_path, having(lm_head__weight=torch.ones(2)))  # of the language model that it was made from
    prepare(model=path)
    _load.cache_clear()
    changed(tmp_path, change)
    with pytest.raises(RewardError, match=f"^args.model: .*{message}"):
        prepare(model=path)


def test_it_computes_on_no_card() -> None:
    verdict = score(sequence_classifier, case(), {"model": "m", "device": "cuda"}, built_in=True)
    assert verdict.problem == "args: unknown device; this reward takes batch, model, output"
