"""Without a network, one quick try; with one, or where the hub is not needed, nothing changes. The tensors of a
model's or adapter's files are those of its config, and finite numbers. Nothing is loaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.errors import WrongInput
from examples.random_families import make_family
from examples.random_model import make_adapter, make_tiny_model
from rollout.data import model_files
from rollout.data.model_files import adapter_weights, check_finite, model_weights
from rollout.data.weight_names import (
    check_adapter,
    check_fit,
    check_model,
    misfits,
    sizes_of,
    transformers_misfits,
)


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "")  # put back afterwards, also where settle() sets it
    for name in model_files.READERS:
        monkeypatch.setattr(f"{name}.HF_HUB_OFFLINE", False)


def offline() -> bool:
    return bool(os.environ.get("HF_HUB_OFFLINE"))


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    model_files.settle(["org/model"])
    assert offline()
    assert constants.HF_HUB_OFFLINE is True


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "CONNECT_S", 0.3)

    def silent(*_: object, **__: object) -> None:
        time.sleep(30)
        raise TimeoutError

    monkeypatch.setattr("socket.create_connection", silent)
    begin = time.monotonic()
    model_files.settle(["model"])
    assert offline()
    assert time.monotonic() - begin < 25


def test_where_nothing_is_to_be_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        model_files.settle(["org/model"])
    assert not offline()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (tmp_path / "org").mkdir()
    model_files.settle([None, "rg:chain_sum", "train.jsonl", "/a/b", "./a", str(tmp_path), "x/y/z"])
    assert not offline()
    monkeypatch.setenv("https_proxy", "http://proxy:8080")
    model_files.settle(["org/model"])
    assert not offline()


def test_name_and_revision_in_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = ("org/m", "b" * 250)
    for name, revision in (
        ("org/model", "main"),
        ("model", "refs/pr/1"),
        ("org/my-m.v2", "a@b"),
        ("org/m", None),
        long,
    ):
        assert model_files.split(model_files.joined(name, revision)) == (name, revision)
    monkeypatch.chdir(tmp_path)
    Path("here@v1").mkdir()
    for folder in ("here@v1", "/models@home/m", "./a@b", "~/a@b"):
        assert model_files.split(folder) == (folder, None)


# The tensors of a model's or adapter's files are those of its config, and finite numbers. Nothing is loaded.

Change = Callable[[dict[str, Tensor]], None]

UP, QUERY, NORM = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "model.norm.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("source") / "tiny")


@pytest.fixture
def model(source: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(source, tmp_path / "model"))


def changed(folder: Path, change: Change, **config: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | config))
    return folder


def without(*names: str) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    return change


def having(**added: Tensor) -> Change:
    return lambda tensors: tensors.update({name.replace("__", "."): one for name, one in added.items()})


def renamed(old: str, new: str) -> Change:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def nothing(tensors: dict[str, Tensor]) -> None: ...


MISFITS: dict[str, tuple[Change, dict[str, Any], list[str]]] = {
    "a matrix": (without(UP), {}, [f"lacks 1 tensor .*random: {UP};"]),
    "a bias": (without(QUERY), {}, [f"lacks 1 tensor .*: {QUERY};"]),
    "the last norm": (without(NORM), {}, [f"lacks 1 tensor .*: {NORM};"]),
    "one of every layer": (
        without(UP, UP.replace("1", "0")),
        {},
        [f"lacks 2 tensors .*: {UP.replace('1', '0')}, {UP};"],
    ),
    "layers": (
        nothing,
        {"num_hidden_layers": 12, "layer_types": None},
        [r"lacks 120 tensors .*: model.layers.2.*, \.\.\.;"],
    ),
    "the head": (nothing, {"tie_word_embeddings": False}, [f"lacks 1 tensor .*: {HEAD};"]),
    "another name": (
        renamed(UP, UP + "s"),
        {},
        [f"lacks 1 tensor .*: {UP};", f"holds 1 tensor .*no place for: {UP}s;"],
    ),
    "something more": (having(foo__bar=torch.ones(3)), {}, ["holds 1 tensor .*no place for: foo.bar;"]),
    "fewer layers": (nothing, {"num_hidden_layers": 1, "layer_types": None}, ["holds 12 tensors .*: model.layers.1"]),
    "a value head": (having(score__weight=torch.ones(1, 64)), {}, ["holds 1 tensor .*: score.weight;"]),
    "a shape": (
        having(model__norm__weight=torch.ones(3)),
        {},
        [f"1 tensor of .* first {NORM}: must be .64., got .3.;"],
    ),
    "a width": (
        nothing,
        {"intermediate_size": 64},
        [r"6 tensors of .* have not the shape .* first model.layers.0.mlp"],
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_both_judges_name_what_does_not_fit(case: str, model: Path) -> None:
    change, config, patterns = MISFITS[case]
    path = str(changed(model, change, **config))
    stored, sizes = model_weights(path), sizes_of(json.loads((model / "config.json").read_text()))
    assert stored is not None
    assert sizes is not None
    said = misfits(path, "model.path", stored, sizes)
    assert said == transformers_misfits(path, "model.path", stored)
    with pytest.raises(WrongInput) as caught:
        check_model(path, "some.key")
    assert str(caught.value).splitlines() == [line.replace("model.path: ", "some.key: ", 1) for line in said]
    assert len(said) == len(patterns)
    for line, pattern in zip(said, patterns, strict=True):
        assert re.search(pattern, line), line


HARMLESS: dict[str, Change] = {
    "rotations": having(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16)),
    "a mask": having(
        model__layers__1__attn__bias=torch.ones(1, 1, 4, 4), model__layers__1__attn__masked_bias=torch.ones(())
    ),
    "a predictor": having(mtp__fc__weight=torch.ones(2, 2)),
    "the tied head": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}),
    "no prefix": lambda tensors: [renamed(name, name.removeprefix("model."))(tensors) for name in [*tensors]].clear(),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_many_checkpoints_carry_is_no_reason_to_refuse(case: str, model: Path) -> None:
    path = str(changed(model, HARMLESS[case]))
    stored = check_model(path)
    assert stored is not None
    assert transformers_misfits(path, "model.path", stored) == []


def test_a_bias_of_the_layer_is_no_mask(model: Path) -> None:
    with pytest.raises(WrongInput, match=r"no place for: model.layers.1.attn.bias"):
        check_model(str(changed(model, having(model__layers__1__attn__bias=torch.ones(64)))))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}), ("llama", {}), ("mistral", {}), ("qwen2", {}),
        ("qwen3", {"attention_bias": True}), ("gemma", {}), ("gemma2", {}), ("gemma3_text", {"attention_bias": True}),
    ],
)  # fmt: skip
def test_the_names_that_are_known_are_those_of_transformers(kind: str, more: dict[str, Any], tied: bool) -> None:
    settings = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **settings, **heads, **more)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        lm = auto.from_config(config)
    found = {name: tuple(weight.shape) for name, weight in lm.named_parameters()}  # a tied one once
    assert sizes_of(config.to_dict()) == found


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "granite"},
        {"model_type": "mistral", "attention_bias": True},
        {"model_type": "qwen3", "head_dim": None},
        {"model_type": "qwen2", "num_key_value_heads": None},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
        {"hidden_size": "64"},
    ],
)
def test_what_depends_on_a_class_is_left_to_transformers(config: dict[str, Any], source: Path) -> None:
    assert sizes_of(json.loads((source / "config.json").read_text()) | config) is None


@pytest.mark.parametrize(
    ("family", "lost"),
    [
        ("qwen3_moe", "model.layers.1.mlp.experts.2.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
        ("glm4", "model.layers.1.mlp.gate_up_proj.weight"),
    ],
)
def test_of_other_architectures_transformers_knows_the_names(family: str, lost: str, tmp_path: Path) -> None:
    path = str(make_family(tmp_path, family))
    assert check_fit(path)
    changed(tmp_path, without(lost))
    with pytest.raises(WrongInput, match=f"lacks 1 tensor .*: {lost};"):
        check_fit(path)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_an_expert_more_than_config_json_has_is_named(family: str, tmp_path: Path) -> None:
    path = str(make_family(tmp_path, family))
    config = json.loads((tmp_path / "config.json").read_text())
    (field,) = (name for name in ("num_experts", "num_local_experts") if name in config)
    last = config[field] - 1
    changed(tmp_path, nothing, **{field: last})
    with pytest.raises(WrongInput, match=rf"holds 6 tensors .* has no place for: .*\.experts\.{last}\."):
        check_fit(path)


def test_what_is_not_here_is_not_judged() -> None:
    assert check_model("nobody/nothing") is None
    assert not check_fit("nobody/nothing")


def test_two_heads_where_there_should_be_one(model: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += 1

    with pytest.raises(WrongInput, match=r"^model.path: .*\(tie_word_embeddings\), and the files hold two different"):
        check_model(str(changed(model, change)))
    changed(model, nothing, tie_word_embeddings=False)
    assert check_model(str(model))


def test_two_sets_of_weights(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    save_file(tensors, model / "a.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")}))
    with pytest.raises(WrongInput, match="holds weights twice, in model.safetensors, .* take away those"):
        check_model(str(model))
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    assert check_model(str(model))


def test_a_tensor_in_two_shards(model: Path) -> None:
    """The same one harms nobody; of two, transformers takes that of the last file."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    where = dict.fromkeys(tensors, "1.safetensors") | {NORM: "2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    save_file({NORM: tensors[NORM], UP: tensors[UP]}, model / "2.safetensors")
    save_file({name: one for name, one in tensors.items() if name != NORM}, model / "1.safetensors")
    assert check_model(str(model))
    save_file({NORM: tensors[NORM], UP: tensors[UP] + 1}, model / "2.safetensors")
    with pytest.raises(
        WrongInput, match=rf"says that {UP} lies in 1\.\w+, and 2\.safetensors holds another one .*1 such"
    ):
        check_model(str(model))


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn],
)
def test_numbers_that_are_not_finite_are_found_wherever_they_stand(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of 16 bytes and segments of 64. The largest numbers are finite."""
    monkeypatch.setattr(model_files, "PIECE", 16)
    monkeypatch.setattr(model_files, "SEGMENT", 64)
    most = torch.finfo(dtype).max
    plain = torch.tensor([0.0, -0.0, most, -most, 1.0, -1.0, torch.finfo(dtype).tiny] * 9, dtype=dtype)
    others = {"empty": torch.ones(0, dtype=dtype), "whole": torch.full((40,), -1)}
    file = tmp_path / "adapter_model.safetensors"

    def wrong(bad: Mapping[str, Tensor]) -> str:
        save_file({"a": plain, **others, **{name: one.clone() for name, one in bad.items()}}, file)
        try:
            check_finite(adapter_weights(str(tmp_path), "k"), "it", "k")
        except WrongInput as error:
            return str(error)
        return ""

    assert wrong({}) == ""
    values = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf])
    for value in values[~values.to(dtype).float().isfinite()].tolist():  # of which F8_E4M3 has two
        for place in (0, 31, 62):
            bad = plain.clone()
            bad[place] = value
            assert wrong({"z": bad, "b": plain}) == (
                "k: it holds numbers that are not finite (nan or inf) in 1 tensor: z; copy or save the weights again"
            )


ADAPTERS: dict[str, tuple[Change, str]] = {
    "a lost half": (
        lambda tensors: without(next(name for name in tensors if "lora_A" in name))(tensors),
        r"lacks weights: 1, first base_model.model.model.layers.\d.*lora_A.weight",
    ),
    "another layer": (
        lambda tensors: tensors.update(
            {"base_model.model.model.layers.7.mlp.up_proj.lora_A.weight": torch.ones(8, 64)}
        ),
        r"has weights that the model has no place for: 1, first .*layers.7.mlp",
    ),
    "another rank": (
        lambda tensors: tensors.update({name: one[:4].clone() for name, one in tensors.items() if "lora_A" in name}),
        r"14 weights of .* another shape than the model's, .* must be \[8, \d+\], got \[4, \d+\]",
    ),
    "no number": (
        lambda tensors: tensors.update({name: one / 0 for name, one in tensors.items() if "1.mlp.up_" in name}),
        r"holds numbers that are not finite \(nan or inf\) in 2 tensors: base_model.model.model.layers.1.mlp.up_",
    ),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_is_of_its_base_and_finite(case: str, source: Path, tmp_path: Path) -> None:
    weights, content = make_adapter(source, seed=0)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(weights)
    sizes = sizes_of(json.loads((source / "config.json").read_text()))
    check_adapter(str(tmp_path), "model.adapter", content, sizes)
    refused(ADAPTERS[case], file, content, sizes)


def refused(case: tuple[Change, str], file: Path, content: dict[str, Any], sizes: Any) -> None:
    """An adapter whose weights were changed."""
    change, pattern = case
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(WrongInput, match=f"^model.adapter: .*{pattern}"):
        check_adapter(str(file.parent), "model.adapter", content, sizes)


ALONE: dict[str, tuple[Change, str]] = {
    "a lost half": (
        ADAPTERS["a lost half"][0],
        r"lacks 1 tensor beside which the other half of a pair is there, first .*lora_A.weight; save",
    ),
    "another rank": (
        ADAPTERS["another rank"][0],
        r"14 tensors of .* must have the rank .*, 8, first .*layers.0.*: got the shape \[4, \d+\]; give",
    ),
    "nothing": (lambda tensors: without(*tensors)(tensors), "must hold weights of a LoRA adapter, and has none; save"),
}


@pytest.mark.parametrize("case", ALONE)
def test_where_the_layers_of_a_base_are_not_known_an_adapter_is_of_pairs_of_its_rank(
    case: str, source: Path, tmp_path: Path
) -> None:
    weights, content = make_adapter(source, seed=0)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(weights)
    check_adapter(str(tmp_path), "k", content, None)
    with pytest.raises(WrongInput, match="^k: r of .* must be a whole number from 1, got '8'; save"):
        check_adapter(str(tmp_path), "k", content | {"r": "8"}, None)
    refused(ALONE[case], file, content, None)
