"""A base that this process shares, without an engine: every weight of a model as a piece of its own."""

from __future__ import annotations

import gc
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cluster.machine import name as machine
from rollout.shared_base import SharedFile, digest_of_piece
from rollout.types import Manifest, Piece, View


@dataclass(frozen=True, slots=True)
class Owner:
    """What stands for a generator: its memory, the tensors in it, and what it tells of them."""

    file: SharedFile
    tensors: dict[str, Tensor]
    manifest: Manifest


def owner_of(path: Path, dtype: torch.dtype = torch.float32) -> Owner:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    weights = dict(model.named_parameters())
    file = SharedFile(weights.values())
    tensors = {name: file.place(weight.detach()).copy_(weight.detach()) for name, weight in weights.items()}
    return Owner(file, tensors, manifest_of(file, tensors))


def manifest_of(file: SharedFile, tensors: dict[str, Tensor]) -> Manifest:
    pieces = {
        name: Piece(str(t.dtype).removeprefix("torch."), t.numel(), digest_of_piece(t), file.handle(t))
        for name, t in tensors.items()
    }
    views = {name: View(name, tuple(t.shape), t.stride(), 0) for name, t in tensors.items()}
    return Manifest("shared_file", machine(), uuid.uuid4().hex, pieces, views, {}, {})


def mappings() -> int:
    """Of shared bases in this process, from both ends."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("gleaner-base")
