"""What leaves the learner: the update for the generators, the folder for users, the masters for a resumed run."""

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
from rollout.types import Adapter, Weights, WeightsInFile
from rollout.weights import Source, WeightsFile, pack, write

# An adapter under the names that vLLM has for its layers, where these are not those of transformers and PEFT.
#
# vLLM takes a fused layer of GLM-4 for two (packed_modules_mapping in its glm4.py). With A shared and B = [B1; B2] one
# adapter of the fused layer is one of each part: [W1; W2] + B A = [W1 + B1 A; W2 + B2 A].

# model_type -> fused layer -> its parts, in the order of their rows
SPLIT: dict[str, dict[str, tuple[str, ...]]] = {"glm4": {"gate_up_proj": ("gate_proj", "up_proj")}}


def differ(model_type: str, config: Mapping[str, Any]) -> bool:
    """Whether vLLM has other names for what an adapter of this content of adapter_config.json changes."""
    return bool(served_config(model_type, config)["target_modules"] != config["target_modules"])


def served_weights(model_type: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """PEFT's name of each weight -> vLLM's; without a copy."""
    served: dict[str, Tensor] = {}
    for name, weight in weights.items():
        layer, _, matrix = name.partition(".lora_")
        parts = _parts(model_type, layer)
        pieces = weight.chunk(len(parts)) if matrix.startswith("B") else [weight] * len(parts)
        served |= {f"{part}.lora_{matrix}": piece for part, piece in zip(parts, pieces, strict=True)}
    return served


def served_config(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of adapter_config.json that goes with served_weights."""
    targets = [part for target in config["target_modules"] for part in _parts(model_type, target)]
    return {**config, "target_modules": targets}


def _parts(model_type: str, layer: str) -> list[str]:
    """vLLM's names of a layer, by its whole name or the last part of it."""
    block, dot, leaf = layer.rpartition(".")
    return [f"{block}{dot}{part}" for part in SPLIT.get(model_type, {}).get(leaf, (leaf,))]


MODEL_FILE = "model.safetensors"


def update_of(policy: Policy, version: int, *, merged: bool = False) -> Adapter | Weights:
    """The present weights in the model's own type: an adapter or the whole model exactly as the learner computes with
    it, or the base's weights merged with the adapter.

    Held once in this process's memory. 16-bit weights that are merged are rounded once more: what moves one by less
    than half of the distance to the next 16-bit number is lost.
    """
    kind, config = policy.model_type, policy.peft_config
    if merged or config is None:
        return Weights.build(version, pack(_weights(policy, merged), policy.dtype))
    masters = served_weights(kind, policy.masters)
    payload = pack({name: Source.of(master) for name, master in masters.items()}, policy.dtype)
    return Adapter.build(version, payload, served_config(kind, config))


def write_weights(policy: Policy, version: int, file: WeightsFile, *, merged: bool) -> WeightsInFile:
    """The whole weights of update_of, in the place of those before."""
    return file.pack(version, _weights(policy, merged), policy.dtype)


def _weights(policy: Policy, merged: bool) -> dict[str, Source]:
    return policy.merged() if merged else policy.trained.sources()


def export(policy: Policy, folder: Path, path: str) -> None:
    """For users. An adapter in PEFT's format, float32, which vLLM loads too, or where it has other names a copy of it
    under those in VLLM_FOLDER; or a whole model in its own type, a model.path for this project, transformers and vLLM.
    The folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    if policy.peft_config is not None:
        _save_adapter(policy.masters, policy.peft_config, folder)
        if differ(policy.model_type, policy.peft_config):
            served = served_weights(policy.model_type, policy.masters)
            _save_adapter(served, served_config(policy.model_type, policy.peft_config), folder / VLLM_FOLDER)
        return
    export_model(policy, policy.trained.sources(), folder, path)


def export_model(policy: Policy, sources: Mapping[str, Source], folder: Path, path: str) -> None:
    """A whole model of these weights, for users. The folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / MODEL_FILE, sources, policy.dtype)
    policy.save_config(folder)
    name, revision = split(path)
    AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False).save_pretrained(folder)


def _save_adapter(weights: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    own = {name: weight.detach().cpu().clone() for name, weight in weights.items()}  # no two may share their memory
    save_file(own, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))


def save_masters(policy: Policy, folder: Path) -> None:
    """The weights that the optimizer updates, for load_masters. The folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    masters = policy.masters
    kinds = {master.dtype for master in masters.values()}
    dtype = kinds.pop() if len(kinds) == 1 else torch.float32  # which holds each of the others
    write(folder / WEIGHTS_FILE, {name: Source.of(master) for name, master in masters.items()}, dtype)


def save(policy: Policy, folder: Path, path: str) -> None:
    """Both in one folder: what load_masters needs, and the form for users. With an adapter these are the same file; a
    whole model lies in `model/` in its own type, beside the masters. The folder is made."""
    if policy.peft_config is not None:
        export(policy, folder, path)
        return
    save_masters(policy, folder)
    export(policy, folder / MODEL, path)


def load_masters(policy: Policy, folder: Path) -> None:
    """Raises ValueError if they are another policy's, FileNotFoundError if the folder holds none."""
    policy.load(load_file(folder / WEIGHTS_FILE))
