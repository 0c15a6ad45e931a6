"""Which model can teach a policy, and what is said of one that cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from examples.random_model import make_tiny_model
from rollout.data.chat import Chat
from rollout.teacher.fit import check_teacher


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("policy") / "tiny", family="Llama")


def notes(teacher: Path | str, policy: Path, longest: int = 100, **how: Any) -> tuple[str, ...]:
    how = {"cuda": False, "shards": 1} | how
    return check_teacher(str(teacher), Chat.load(str(policy)), str(policy), longest, "float32", **how)


def changed(model: Path, folder: Path, file: str, change: Callable[[Any], None]) -> Path:
    """A copy of the model with another content in one of its JSON files."""
    shutil.copytree(model, folder)
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    return folder


def test_a_larger_model_of_another_family_with_the_same_tokenizer_teaches(policy: Path, tmp_path: Path) -> None:
    larger = make_tiny_model(tmp_path / "larger", seed=1, hidden_size=128, layers=3, heads=4, family="Qwen2")
    assert notes(larger, policy) == ()
    padded = changed(larger, tmp_path / "padded", "config.json", lambda told: told.update(model_type="unknown_kind"))
    assert notes(padded, policy) == ()  # whether vLLM has it, its trial says


def test_another_id_for_one_token_is_refused_and_more_tokens_are_not(policy: Path, tmp_path: Path) -> None:
    def swapped(told: Any) -> None:
        vocab = told["model"]["vocab"]
        first, second = sorted(vocab, key=vocab.get)[20:22]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    other = changed(policy, tmp_path / "other", "tokenizer.json", swapped)
    with pytest.raises(
        WrongInput, match=r"^model.teacher: must have the policy's tokenizer.* 2 of \d+ tokens differ, fi"
    ):
        notes(other, policy)

    def more(told: Any) -> None:
        told["added_tokens"].append(told["added_tokens"][-1] | {"id": 260, "content": "<|more|>"})

    richer = changed(policy, tmp_path / "richer", "tokenizer.json", more)
    with pytest.raises(
        WrongInput, match=r" 1 of 261 tokens differ, first 260: .*more.* no token to .*tiny; give a teac"
    ):
        notes(policy, richer)
    assert notes(richer, policy) == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"max_position_embeddings": 100},
            r"model.teacher: must have a context above .*100 tokens, and that of .* is 100",
        ),
        ({"vocab_size": 32}, "model.teacher: must have a logprob for each id that the policy may sample, and .* 32"),
        ({"is_encoder_decoder": True}, "model.teacher: must be a causal language model.* is an encoder and a decoder"),
        ({"mamba_d_state": 4}, r"model.teacher: .* layers that carry a state .*\(cluster.gpus.teacher"),
    ],
)
def test_what_its_config_says_against_it(policy: Path, tmp_path: Path, change: Any, said: str) -> None:
    def with_change(told: Any) -> None:
        told.update(change, quantization_config={"quant_method": "awq"})  # whose weights only vLLM looks at

    other = changed(policy, tmp_path / "other", "config.json", with_change)
    with pytest.raises(WrongInput, match=said):
        notes(other, policy)


def test_cards_that_do_not_divide_it_damaged_weights_and_nothing_there(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput, match="^cluster.gpus.teacher: a teacher of 3 processes must divide .* 2 attention heads"
    ):
        notes(policy, policy, cuda=True, shards=3)
    shutil.copytree(policy, tmp_path / "damaged")
    with (tmp_path / "damaged" / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(WrongInput, match="^model.teacher: .*damaged"):
        notes(tmp_path / "damaged", policy)
    with pytest.raises(WrongInput, match="^model.teacher: "):
        notes(tmp_path / "nowhere", policy)


def test_another_chat_template_is_told(policy: Path, tmp_path: Path) -> None:
    shutil.copytree(policy, tmp_path / "other")
    for file in (tmp_path / "other").glob("*.jinja"):
        file.write_text("{{ messages[0].content }}")
    (told,) = notes(tmp_path / "other", policy)
    assert told.startswith(f"model.teacher: {tmp_path / 'other'} has another chat template")
