"""Exports the policy: the update for the generators, the folder for users, and the masters for a resumed run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from learner.model.adapter_config import CONFIG_FILE, MODEL, VLLM_FOLDER
from learner.model.policy import Policy
from rollout.data.model_files import WEIGHTS_FILE, split
from rollout.data.weight_names import EXPERTS_BLOCKS
from rollout.text_part import text_adapter, whole_adapter
from rollout.types import Adapter, Weights, WeightsInFile
from rollout.weights import Source, WeightsFile, in_halves, pack, turned_heads, write

# vLLM's names of an adapter's layers, where these differ from the names in transformers and PEFT.
#
# vLLM treats a fused layer of GLM-4 as two layers (packed_modules_mapping in its glm4.py). An adapter of the fused
# layer is an adapter of each part, with the same A and B = [B1; B2]: [W1; W2] + B A = [W1 + B1 A; W2 + B2 A].
#
# Some layers of Gemma 4 compute keys and values by one matrix (attention_k_eq_v). vLLM holds it twice, as k_proj and as
# v_proj, so the adapter of k_proj is that of v_proj, too.
#
# Llama 4's queries and keys have the same names, and their rows another order (rollout.weights.in_halves).
#
# The experts of Mixtral and MiniMax-M2 are in a block of another name (rollout.data.weight_names.EXPERTS_BLOCKS).

# model_type -> fused layer -> its parts, in the order of their rows
SPLIT: dict[str, dict[str, tuple[str, ...]]] = {"glm4": {"gate_up_proj": ("gate_proj", "up_proj")}}
KEYS, VALUES = "self_attn.k_proj", "self_attn.v_proj"


class ServedNames:
    """vLLM's names of an adapter's layers on a model.

    Args:
        config: transformers' configuration of the model, or of its text part.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._split = SPLIT.get(config.model_type, {})
        self._renames = config.model_type in ("mixtral", "minimax_m2")
        one_matrix = config.model_type == "gemma4_text" and config.attention_k_eq_v
        kinds = config.layer_types if one_matrix else ()
        self._blocks = {f"layers.{i}" for i, kind in enumerate(kinds) if kind != "sliding_attention"}

    def weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the adapter's weights as vLLM computes with them, by its names; only what is in another order is a
        copy. weights: by PEFT's names."""
        served: dict[str, Tensor] = {}
        for name, weight in weights.items():
            layer, _, matrix = name.partition(".lora_")
            parts = self._parts(layer.replace(*EXPERTS_BLOCKS) if self._renames else layer)
            fused = len(parts) > 1 and matrix.startswith("B")
            if (heads := turned_heads(self._config, layer.rpartition(".")[2])) and matrix.startswith("B"):
                weight = in_halves(weight, heads)
            pieces = weight.chunk(len(parts)) if fused else [weight] * len(parts)
            served |= {f"{part}.lora_{matrix}": piece for part, piece in zip(parts, pieces, strict=True)}
            if self._gives_values(layer):
                served[f"{layer.removesuffix(KEYS)}{VALUES}.lora_{matrix}"] = weight
        return served

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the content of adapter_config.json that goes with `weights`."""
        targets = [part for target in config["target_modules"] for part in self._parts(target)]
        leaves = [target.rpartition(".")[2] for target in targets]
        if self._blocks and "k_proj" in leaves and "v_proj" not in leaves:
            targets.append("v_proj")
        return {**config, "target_modules": targets}

    def _parts(self, layer: str) -> list[str]:
        """Returns vLLM's names of a layer, whose name may be whole or only its last part."""
        block, dot, leaf = layer.rpartition(".")
        return [f"{block}{dot}{part}" for part in self._split.get(leaf, (leaf,))]

    def _gives_values(self, layer: str) -> bool:
        block = layer.removesuffix(f".{KEYS}")
        return block != layer and ".".join(block.split(".")[-2:]) in self._blocks


MODEL_FILE = "model.safetensors"


def update_of(policy: Policy, version: int, *, merged: bool = False) -> Adapter | Weights:
    """Returns the present weights in the model's dtype: an adapter or the whole model exactly as the learner computes
    with it, or with `merged` the base's weights merged with the adapter.

    The payload is held once in this process's memory. Merged 16-bit weights are rounded once more: a change of less
    than half the distance to the next 16-bit number is lost.
    """
    config = policy.peft_config
    if merged or config is None:
        return Weights.build(version, pack(_weights(policy, merged), policy.dtype))
    names = ServedNames(policy.config)
    masters = names.weights(policy.masters)
    payload = pack({name: Source.of(master) for name, master in masters.items()}, policy.dtype)
    return Adapter.build(version, payload, names.config(config))


def write_weights(policy: Policy, version: int, file: WeightsFile, *, merged: bool) -> WeightsInFile:
    """Writes whole weights, as update_of returns them, into the file, in the place of those of an earlier version."""
    return file.pack(version, _weights(policy, merged), policy.dtype)


def _weights(policy: Policy, merged: bool) -> dict[str, Source]:
    return policy.merged() if merged else policy.trained.sources()


def export(policy: Policy, folder: Path, path: str) -> None:
    """Writes the policy for users into a folder, which is created. An adapter is written in PEFT's format in float32,
    which vLLM loads; where vLLM has other names or another order of rows, a copy with those is written into
    VLLM_FOLDER. The adapter of a checkpoint's text part has the names of the whole checkpoint, on which others load it.
    A whole model is written in its dtype, and can be loaded by transformers, vLLM and as model.path. path: the base
    model's name or folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if policy.peft_config is None:
        export_model(policy, policy.trained.sources(), folder, path)
        return
    names, config = ServedNames(policy.config), policy.peft_config
    served = names.weights(policy.masters)
    _save_adapter(policy, policy.masters, config, folder)
    if served.keys() != policy.masters.keys() or any(served[name] is not own for name, own in policy.masters.items()):
        _save_adapter(policy, served, names.config(config), folder / VLLM_FOLDER)


def export_model(policy: Policy, sources: Mapping[str, Source], folder: Path, path: str) -> None:
    """Writes a whole model of these weights, with configuration and tokenizer, into a folder, which is created."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / MODEL_FILE, sources, policy.dtype)
    policy.save_config(folder)
    name, revision = split(path)
    AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False).save_pretrained(folder)


def _save_adapter(policy: Policy, weights: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: weight.detach().cpu().clone() for name, weight in weights.items()}  # save_file refuses shared memory
    whole, content = whole_adapter(own, config, policy.text_prefix)
    save_file(whole, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2))


def save_masters(policy: Policy, folder: Path) -> None:
    """Writes the weights that the optimizer updates into a folder, which is created; load_masters reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    masters = policy.masters
    kinds = {master.dtype for master in masters.values()}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32  # float32 can hold the numbers of all dtypes
    write(folder / WEIGHTS_FILE, {name: Source.of(master) for name, master in masters.items()}, dtype)


def save(policy: Policy, folder: Path, path: str) -> None:
    """Writes into a folder, which is created, both the masters for load_masters and the policy for users. With an
    adapter both are the same file; a whole model is written to `model/` in its dtype, beside the masters."""
    if policy.peft_config is not None:
        export(policy, folder, path)
        return
    save_masters(policy, folder)
    export(policy, folder / MODEL, path)


def load_masters(policy: Policy, folder: Path) -> None:
    """Sets the policy's masters from a folder. Raises ValueError if names or shapes differ, FileNotFoundError if the
    folder has none."""
    policy.load(text_adapter(load_file(folder / WEIGHTS_FILE)))
