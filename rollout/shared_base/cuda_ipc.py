"""A base on a card: torch's own handles of CUDA memory, which another process on the same card opens.

Written by reading torch/multiprocessing/reductions.py (the same in torch 2.11 to 2.14); run on an H200 with torch 2.13.
Memory that is mapped so is writable, and torch's allocator does not count it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rollout.shared_base.manifest import BaseNotShared, Manifest

_DEVICE = 6  # which argument of rebuild_cuda_tensor is the index of the card
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def handles_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Name -> handle. To be made anew for each process that opens them: torch counts one consumer for each.

    Raises BaseNotShared with expandable segments, whose handles go through pidfd_getfd, which containers forbid.
    """
    wrong = [f"{name}={os.environ[name]}" for name in _SETTINGS if "expandable_segments:true" in _setting(name)]
    if wrong:
        raise BaseNotShared(
            f"memory.base: shared needs a generator without expandable segments, got {', '.join(wrong)}; leave that out"
        )
    torch.cuda.synchronize()  # what is being written must be there before another process reads it
    # Of the data and not of the parameter, whose class is vLLM's: the learner would import vLLM to open it.
    return {name: pickle.dumps(_arguments(tensor.data.view(-1))) for name, tensor in tensors.items()}


def _arguments(tensor: Tensor) -> tuple[Any, ...]:
    """Of rebuild_cuda_tensor."""
    arguments: tuple[Any, ...] = reduce_tensor(tensor)[1]  # type: ignore[no-untyped-call]
    return arguments


def _setting(name: str) -> str:
    return os.environ.get(name, "").lower().replace(" ", "")


def card(device: torch.device) -> str:
    """The card's UUID; its index may be another in another process."""
    return f"card {torch.cuda.get_device_properties(device).uuid}"


def map_pieces(manifest: Manifest, device: torch.device) -> dict[str, Tensor]:
    """Each piece as a tensor [elements] on the card."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = {}
    for name, piece in manifest.pieces.items():
        arguments = list(pickle.loads(piece.handle))  # of our own generator
        arguments[_DEVICE] = index
        found[name] = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return found
