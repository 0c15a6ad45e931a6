"""Models and adapters that cannot be trained are refused before anything starts, in one line; nothing is written."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from transformers import AutoConfig

from cluster.errors import WrongInput
from examples.random_families import make_family
from examples.random_model import make_adapter, make_tiny_model
from examples.random_towers import make_checkpoint
from learner.config import RunConfig
from learner.driver.input_checks import (
    ENGINE,
    LEARNER,
    SHARED_BASE,
    TEACHER,
    Trial,
    adapter_notes,
)
from learner.model.base import without_weights
from learner.model.export import ServedNames, export
from learner.model.trial import not_by_rows
from learner.tools.evaluation import policy_of
from rollout.data.chat import Chat
from rollout.data.model_files import WEIGHTS_FILE
from rollout.types import View
from tests.learner.driver.test_preflight import check, config, model
from tests.learner.model.test_packing_check import random_adapter
from tests.learner.model.test_policy import make_policy

__all__ = ["config", "model"]  # fixtures


@pytest.fixture
def adapter(tmp_path: Path, model: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    payload, content = make_adapter(model, seed=1, targets=["q_proj", "v_proj"])
    (folder / "adapter_model.safetensors").write_bytes(payload)
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def test_settings_that_are_left_open_follow_the_adapter(
    config: dict[str, Any], adapter: Path, no_trials: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = check(
        config, "--dry-run", "--verbose", f"model.adapter={adapter}", "learner.lora.alpha=16", capsys=capsys
    )
    assert code == 0
    assert "learner.lora follows model.adapter: rank 8, targets ['q_proj', 'v_proj']" in out
    assert "rank: 8" in out


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({}, ["learner.lora.rank=16"], "model.adapter: r of .* must be 16 as learner.lora.rank says, got 8"),
        ({"init_lora_weights": "pissa"}, [], "model.adapter: init_lora_weights of .* must not be set, got 'pissa'"),
    ],
)
def test_an_adapter_that_contradicts_the_settings_is_refused(
    config: dict[str, Any],
    adapter: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    words: list[str],
    message: str,
) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    code, _, err = check(config, f"model.adapter={adapter}", *words, capsys=capsys)
    assert code == 2
    assert re.search(message, err)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": {"hidden_size": 8}}, "model.path: .* takes vision beside text and names no text part"),
        ({"original_max_position_embeddings": 64, "rope_scaling": {"rope_type": "longrope"}}, "at most 64 .* got 80"),
    ],
)
def test_a_model_that_is_not_trained_here_is_refused(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    shutil.copytree(config["model"]["path"], tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    content = json.loads(file.read_text())
    content.pop("rope_parameters", None)
    file.write_text(json.dumps(content | change))
    code, _, err = check(config, f"model.path={tmp_path / 'model'}", capsys=capsys)
    assert code == 2
    assert re.search(message, err)
    assert not Path("runs").exists()


def test_a_teacher_is_planned_and_tried_or_refused_before_anything_starts(
    config: dict[str, Any], model: Path, tmp_path: Path, no_trials: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    larger = make_tiny_model(tmp_path / "larger", seed=3, hidden_size=128, layers=3, heads=4)
    config["learner"] = {"algorithm": "distill", "loss": {"beta": 1}}
    code, out, _ = check(config, "--dry-run", f"model.teacher={larger}", capsys=capsys)
    assert (code, no_trials) == (0, [LEARNER, ENGINE, TEACHER])
    assert "placement    teacher-0: 1 CPU, 0 GPU" in out
    assert re.search(r"; model.teacher: 1.0 GiB planned on the CPU \(weights 2 MiB, .* 4096 tokens a step\)", out)
    short = ("rollout.max_prompt_length=448", "rollout.max_completion_length=64")  # its context is 512
    code, _, err = check(config, f"model.teacher={larger}", *short, capsys=capsys)
    assert (code, "error: model.teacher: must have a context above " in err, err.count("\n")) == (2, True, 1)
    code, _, err = check(config, "model.teacher=/nope", capsys=capsys)
    assert (code, "error: model.teacher: folder must exist, got /nope" in err, err.count("\n")) == (2, True, 1)
    code, _, err = check(config, f"model.teacher={larger}", "memory.device=1GiB", capsys=capsys)
    assert (code, "error: model.teacher: " in err, "or raise memory.device" in err) == (2, True, True)
    assert not Path("runs").exists()


@pytest.mark.parametrize("folder", ["/nope", "/" + "x" * 5000])
def test_an_adapter_that_is_not_there(config: dict[str, Any], capsys: pytest.CaptureFixture[str], folder: str) -> None:
    for name in ("adapter", "reference"):
        code, _, err = check(config, f"model.{name}={folder}", "learner.loss.beta=0.1", capsys=capsys)
        assert code == 2
        assert f"model.{name}: must be a folder with an adapter_config.json, got {folder[:100]}" in err


def test_an_adapter_of_another_base_or_template_is_said(
    config: dict[str, Any], model: Path, adapter: Path, tmp_path: Path, no_trials: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """By the weights where both bases are here; names alone say nothing for sure."""
    file, chat = adapter / "adapter_config.json", Chat.load(str(model))
    content = json.loads(file.read_text())
    shutil.copytree(model, tmp_path / "moved")
    make_tiny_model(tmp_path / "other", seed=9)

    def said(base: Path | str) -> tuple[str, ...]:
        file.write_text(json.dumps(content | {"base_model_name_or_path": str(base)}))
        return adapter_notes(str(adapter), "model.adapter", str(model), chat)

    assert [said(base) for base in (model, tmp_path / "moved", "/gone/tiny", "hub/tiny")] == [()] * 4
    with pytest.raises(WrongInput, match="^model.adapter: base_model_name_or_path .*/other, whose weights are"):
        said(tmp_path / "other")
    (line,) = said("Qwen/Qwen2.5-0.5B")
    assert line.startswith(f"model.adapter: {adapter} was trained on Qwen/Qwen2.5-0.5B (base_model_name_or_path of its")
    both = f"model.adapter={adapter}", f"model.reference={adapter}", "learner.loss.beta=0.1"
    code, out, _ = check(config, "--dry-run", *both, capsys=capsys)
    assert (code, line in out, line.replace("model.adapter", "model.reference", 1) in out) == (0, True, True)
    (adapter / "tokenizer_config.json").write_text((model / "tokenizer_config.json").read_text())
    shutil.copy(model / "chat_template.jinja", adapter)
    assert said(model) == ()
    (adapter / "chat_template.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    (line,) = said(model)
    assert line.startswith(
        f"model.adapter: {adapter} has a chat template of its own, which is not that of {model}, and"
    )
    (adapter / "chat_template.jinja").unlink()
    (adapter / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0]['content'] }}"}))
    assert said(model) == (line,)


@pytest.mark.parametrize("base", ["~nosuchuser/x", "x" * 5000, "a\nb\ud800"])
def test_a_base_that_nothing_can_be_called_is_another_one(base: str, model: Path, adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    (line,) = adapter_notes(str(adapter), "--adapter", str(model), Chat.load(str(model)))
    assert line.startswith(f"--adapter: {adapter} was trained on {base[:1]}")
    assert len(line.encode().splitlines()) == 1
    assert len(line) < 800


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda file: file.write_bytes(b"caf\xe9"), "must be UTF-8 text, got the byte 0xe9 at 3"),
        (lambda file: file.open("w").truncate(3 * 2**30), "must have at most 1 MiB, and has more"),
        (os.mkfifo, "must be a regular file, and is a FIFO"),
    ],
)
def test_a_chat_template_of_an_adapter_that_cannot_be_read_is_refused(
    make: Callable[[Path], object], said: str, model: Path, adapter: Path
) -> None:
    make(adapter / "chat_template.jinja")
    with pytest.raises(WrongInput) as refused:
        adapter_notes(str(adapter), "--adapter", str(model), Chat.load(str(model)))
    assert str(refused.value) == f"--adapter: {adapter}/chat_template.jinja {said}; copy it again, or take it away"


COPIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no number": (
        lambda one: one[UP + ".lora_A.weight"].mul_(torch.nan),
        r"not finite .* in 1 tensor: .*1\.mlp\.up_proj",
    ),
    "a lost half": (lambda one: one.pop(UP + ".lora_B.weight"), r"lacks .*1.*1\.mlp\.up_proj\.lora_B"),
    "a lost layer": (
        lambda one: [one.pop(f"{UP}.lora_{half}.weight") for half in "AB"],
        r"lacks .*: 2, .*1\.mlp\.up_proj",
    ),
    "an older copy": (
        lambda one: one.update({UP + ".lora_A.weight": one[UP + ".lora_A.weight"] * 2}),
        r"must be a copy of the adapter in \S+/a, and has other numbers in 1 tensor, first .*1\.mlp\.up_proj",
    ),
}
UP = "base_model.model.model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("family", ["known", "glm4"])
@pytest.mark.parametrize("case", COPIES)
def test_the_copy_of_an_adapter_that_is_served_is_looked_at(
    case: str, family: str, model: Path, tmp_path: Path
) -> None:
    """In that of GLM-4 a fused layer is two, and the layers of its base are not known without torch."""
    base, folder = model, tmp_path / "a"
    if family == "glm4":
        base = make_family(tmp_path / "glm4", family)
    targets = ["q_proj", "gate_up_proj" if family == "glm4" else "up_proj"]
    payload, content = make_adapter(base, seed=1, targets=targets)
    weights = load(payload)
    names = ServedNames(SimpleNamespace(model_type=family))
    copied = names.weights(weights)
    (folder / "vllm").mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(content))
    (folder / "vllm" / "adapter_config.json").write_text(json.dumps(names.config(content)))

    def copy(weights: dict[str, Any]) -> None:
        save_file({name: one.clone() for name, one in weights.items()}, folder / "vllm" / WEIGHTS_FILE)

    copy(copied)
    assert policy_of(str(folder), str(base)).payload == (folder / "vllm" / WEIGHTS_FILE).read_bytes()
    change, said = COPIES[case]
    spoiled = {name: one.clone() for name, one in copied.items()}
    change(spoiled)
    copy(spoiled)
    with pytest.raises(WrongInput, match=f"^--adapter: {folder}/vllm .*{said}"):
        policy_of(str(folder), str(base))


def exported(folder: Path, name: str) -> Path:
    """The adapter of a run on a checkpoint with towers, in folder/a; returns the checkpoint."""
    base = make_checkpoint(folder / "base", name)
    policy = make_policy(str(base))
    random_adapter(policy)
    export(policy, folder / "a", str(base))
    return base


def test_an_adapter_of_llama_4_is_served_from_its_copy_alone(tmp_path: Path) -> None:
    base = exported(tmp_path, "llama4")
    copy = (tmp_path / "a" / "vllm" / WEIGHTS_FILE).read_bytes()
    assert policy_of(str(tmp_path / "a"), str(base)).payload == copy != (tmp_path / "a" / WEIGHTS_FILE).read_bytes()
    shutil.rmtree(tmp_path / "a" / "vllm")
    with pytest.raises(WrongInput, match=r"^--adapter: an adapter of Llama 4 must have a copy .* has no vllm/; give"):
        policy_of(str(tmp_path / "a"), str(base))


def test_an_adapter_of_gemma_4_whose_keys_are_values_is_served(tmp_path: Path) -> None:
    base = exported(tmp_path, "gemma4_dense")
    copy = (tmp_path / "a" / "vllm" / WEIGHTS_FILE).read_bytes()
    assert policy_of(str(tmp_path / "a"), str(base)).payload == copy


def refusal(model: dict[str, str], config: dict[str, Any]) -> str | None:
    """What the process of --dry-run says that tries to share the base."""
    shared = RunConfig.model_validate(config | {"model": model, "memory": {"layout": "shared"}})
    try:
        Trial(SHARED_BASE, shared).finish()
    except WrongInput as error:
        return str(error)
    return None


@pytest.mark.long
def test_weights_that_are_no_views_are_refused_without_reading_one(
    config: dict[str, Any], tmp_path: Path, no_trials: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(config, "--dry-run", "memory.layout=shared", capsys=capsys)[0] == 0
    assert no_trials == [LEARNER, ENGINE, SHARED_BASE]
    dense = {"path": config["model"]["path"], "base": "nf4", "dtype": "bfloat16"}
    assert refusal(dense, config) is None
    said = refusal(dense | {"path": str(make_family(tmp_path / "experts", "qwen3_moe"))}, config)
    assert said is not None
    assert re.match(r"memory.layout: .* 4 of 25 are none \(model.layers.0.mlp.experts.*=auto", said)


def test_4_bits_are_packed_of_whole_rows_alone(model: Path) -> None:
    lm = without_weights(AutoConfig.from_pretrained(model), torch.bfloat16, None)
    name = "model.layers.0.mlp.up_proj.weight"
    rows, columns = lm.get_parameter(name).shape
    views = {
        name: View("gate_up", (rows, columns), (1, rows), 0),
        "model.layers.1.mlp.up_proj.weight": View("gate_up", (rows, columns), (columns, 1), 0),
        "model.embed_tokens.weight": View("embedding", (260, 64), (1, 260), 0),  # not packed
    }
    assert list(not_by_rows(lm, views)) == [name]


@pytest.mark.parametrize("name", ["model[2]", "what?/model"])
def test_a_folder_whose_path_vllm_takes_for_a_pattern(
    config: dict[str, Any], model: Path, tmp_path: Path, name: str, no_trials: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.copytree(model, tmp_path / name)
    code, _, err = check(config, "--dry-run", f"model.path={tmp_path / name}", capsys=capsys)
    assert code == 2
    (line,) = [one for one in err.splitlines() if one.startswith("error: ")]
    assert line.startswith("error: model.path: a folder's path must be without * ? and [, which vLLM takes for")
