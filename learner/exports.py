"""What leaves the learner: the update for the generators, the folder for users, the masters for a resumed run."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from learner.adapters import WEIGHTS_FILE
from learner.model import Policy
from learner.publishing import MODEL
from rollout.payload import Source, pack
from rollout.types import Adapter, Weights

CONFIG_FILE, MODEL_FILE = "adapter_config.json", "model.safetensors"


def update_of(policy: Policy, version: int, *, merged: bool = False) -> Adapter | Weights:
    """The present weights in the model's own type: an adapter or the whole model exactly as the learner computes with
    it, or the base's weights merged with the adapter.

    Held once in this process's memory. 16-bit weights that are merged are rounded once more: what moves one by less
    than half of the distance to the next 16-bit number is lost.
    """
    dtype = policy.head.dtype
    if merged:
        return Weights.build(version, pack(policy.merged(), dtype))
    payload = pack({name: Source.of(master) for name, master in policy.masters.items()}, dtype)
    if policy.peft_config is None:
        return Weights.build(version, payload)
    return Adapter.build(version, bytes(payload), policy.peft_config)


def export(policy: Policy, folder: Path, path: str) -> None:
    """For users. An adapter in PEFT's format, float32; or a whole model in its own type, a model.path for this project,
    transformers and vLLM. The folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    if policy.peft_config is not None:
        save_masters(policy, folder)
        (folder / CONFIG_FILE).write_text(json.dumps(policy.peft_config, indent=2))
        return
    dtype = policy.head.dtype
    weights = {name: master.detach().to("cpu", dtype) for name, master in policy.masters.items()}
    save_file(weights, folder / MODEL_FILE, metadata={"format": "pt"})
    policy.save_config(folder)
    AutoTokenizer.from_pretrained(path, trust_remote_code=False).save_pretrained(folder)


def save_masters(policy: Policy, folder: Path) -> None:
    """The weights that the optimizer updates, for load_masters. The folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: master.detach().cpu() for name, master in policy.masters.items()}, folder / WEIGHTS_FILE)


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
