"""Adapters in PEFT's format for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForSequenceClassification

from examples.random_model import make_adapter


def written_adapter(tiny_path: str, folder: Path, seed: int) -> str:
    """The folder, with an adapter in it whose weights are the seed's."""
    payload, config = make_adapter(Path(tiny_path), seed=seed)
    (folder / "adapter_model.safetensors").write_bytes(payload)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def written_value(path: str, folder: Path, targets: Sequence[str]) -> str:
    """The folder, with an adapter in it that has a scalar head; no weight is zero."""
    torch.manual_seed(3)
    base: Any = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=8, lora_alpha=16, target_modules=list(targets), task_type="SEQ_CLS")
    )
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(str(folder))
    return str(folder)
