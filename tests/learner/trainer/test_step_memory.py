"""What a whole optimizer step takes, at a vocabulary of 128k: a matter of the token budget alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.learner.rollouts import make_group, uniform
from tests.learner.trainers import make_trainer
from tests.peak import peak_bytes

VOCAB, PROMPT, COMPLETION, BUDGET = 128_000, 24, 33, 24 + 4 * 32


@pytest.fixture(scope="module")
def wide_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def step_peak(path: str, generations: int, algorithm: str = "grpo") -> int:
    """Of the second step, with the optimizer's states there."""
    trainer = make_trainer(path, token_budget=BUDGET, algorithm=algorithm)
    prompt = [7] * PROMPT

    def step(count: int) -> None:
        completions = [[100 + i] * COMPLETION for i in range(count)]
        trainer._step([make_group(prompt, completions, [float(i) for i in range(count)], uniform)])

    step(2)
    return peak_bytes(lambda: step(generations))


def naive_peak(path: str, generations: int) -> int:
    """The usual way: padded prompts and completions, whole logits, log_softmax; the base alone, nothing trained but
    the norms, so that hardly anything but activations and logits counts."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, weight in model.named_parameters():
        weight.requires_grad_("norm" in name)
    ids = torch.randint(0, VOCAB, (generations, PROMPT + COMPLETION))

    def work() -> None:
        logits = model(input_ids=ids, logits_to_keep=COMPLETION + 1, use_cache=False).logits[:, :-1]
        logs = logits.log_softmax(-1).gather(2, ids[:, PROMPT:, None])
        torch.autograd.backward(logs.mean())

    return peak_bytes(work)


def test_peak_does_not_grow_with_the_generations_and_is_an_eighth_of_the_usual(wide_path: str) -> None:
    four, many = step_peak(wide_path, 4), step_peak(wide_path, 64)
    assert many <= 1.05 * four
    assert step_peak(wide_path, 16) <= naive_peak(wide_path, 16) / 8


def test_the_values_pass_fits_into_the_room_of_the_policys(wide_path: str) -> None:
    """Its gradients, which stay, are less than a hundredth of it."""
    assert step_peak(wide_path, 16, "ppo") <= 1.05 * step_peak(wide_path, 16)
