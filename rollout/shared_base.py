"""A base model's memory that two processes on one machine share (memory.layout: shared): a file on a CPU, handles of
CUDA memory on a card, and digests by which both prove that they see the same.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from cluster.errors import WrongInput
from rollout.types import Manifest
from rollout.weights import as_bytes

# Digests of a base model's memory that a card computes as well as a CPU: sums of integers, exact in any order.


CHUNK = 1 << 20  # elements at once, as int64: 8 MiB, and as much again for their places and their products
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def digests_of_pieces(pieces: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> digest of each tensor."""
    return {name: digest_of_piece(piece) for name, piece in pieces.items()}


@torch.no_grad()
def digest_of_piece(piece: Tensor) -> str:
    """Hex digest of type, size and bits of a tensor without gaps: the sum of its elements' bits, and their sum
    weighted by position, modulo 2**64. It is made to find an accident, not an attack."""
    bits = piece.detach().reshape(-1).view(_BITS[piece.element_size()])
    positions = torch.arange(min(CHUNK, bits.numel()), device=bits.device)
    plain = weighted = 0
    for start in range(0, bits.numel(), CHUNK):
        values = bits[start : start + CHUNK].to(torch.int64)
        once = int(values.sum())
        plain += once
        weighted += int((values * positions[: len(values)]).sum()) + start * once
    told = f"{piece.dtype} {bits.numel()} {plain % 2**64} {weighted % 2**64}"
    return hashlib.sha256(told.encode()).hexdigest()[:32]


# A base on a CPU: memory of its owner that other processes of the same user may map, for reading only.
#
# It is a file without a name (memfd_create): it takes no room in /dev/shm, and is gone when nobody maps it any more,
# even if its owner was killed. Others open it for reading, so that the system refuses to map it for writing, and a
# write through their mapping ends them with SIGSEGV.

_ALIGNED = 64  # bytes; a cache line, and the widest vector register
_NAME = "gleaner-base"


class SharedFile:
    """Uninitialised memory for tensors. Once the garbage collector takes it, others' mappings stay."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Room for tensors of these types and sizes."""
        size = sum(_rounded(tensor.nbytes) for tensor in tensors)
        self._file = os.fdopen(os.memfd_create(_NAME), "r+b")
        os.ftruncate(self._file.fileno(), size)
        self._whole = torch.frombuffer(mmap.mmap(self._file.fileno(), size), dtype=torch.uint8)
        self._end = 0

    def place(self, like: Tensor) -> Tensor:
        """The next part of the file as a tensor of that type and shape, without gaps."""
        start, self._end = self._end, self._end + _rounded(like.nbytes)
        return self._whole[start : start + like.nbytes].view(like.dtype).view(like.shape)

    def handle(self, tensor: Tensor) -> bytes:
        """Of a tensor that was placed here."""
        where = {"pid": os.getpid(), "fd": self._file.fileno(), "start": tensor.data_ptr() - self._whole.data_ptr()}
        return json.dumps(where).encode()


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def map_file(manifest: Manifest) -> dict[str, Tensor]:
    """Each piece as a read-only tensor [elements].

    Raises WrongInput if the owner or its file is gone, or may not be opened.
    """
    files: dict[str, Tensor] = {}
    found = {}
    for name, piece in manifest.pieces.items():
        where: Mapping[str, int] = json.loads(piece.handle)
        path = f"/proc/{where['pid']}/fd/{where['fd']}"
        if path not in files:
            files[path] = _map(path)
        dtype: torch.dtype = getattr(torch, piece.dtype)
        end = where["start"] + piece.elements * dtype.itemsize
        found[name] = files[path][where["start"] : end].view(dtype)
    return found


def _map(path: str) -> Tensor:
    """The whole file, [bytes]."""
    try:
        if _NAME not in os.readlink(path):
            raise FileNotFoundError(f"it is {os.readlink(path)} now")
        with open(path, "rb") as file:
            view = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise WrongInput(
            f"memory.layout: shared: the generator's base cannot be mapped ({path}: {error}); both processes must run "
            "in one container, as one user; or set memory.layout=auto"
        ) from error
    return as_bytes(view)


# A base on a card: torch's own handles of CUDA memory, which another process on the same card opens.
#
# Written by reading torch/multiprocessing/reductions.py (the same in torch 2.11 to 2.14); run on an H200 with torch
# 2.13. Memory that is mapped so is writable, and torch's allocator does not count it.

_DEVICE = 6  # which argument of rebuild_cuda_tensor is the index of the card
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def handles_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Name -> handle. To be made anew for each process that opens them: torch counts one consumer for each.

    Raises WrongInput with expandable segments, whose handles go through pidfd_getfd, which containers forbid.
    """
    wrong = [f"{name}={os.environ[name]}" for name in _SETTINGS if "expandable_segments:true" in _setting(name)]
    if wrong:
        raise WrongInput(
            f"memory.layout: shared needs a generator without expandable segments, got {', '.join(wrong)}; leave that "
            "out"
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


def card_of(device: torch.device) -> str:
    """The card's UUID; its index may be another in another process."""
    return f"card {torch.cuda.get_device_properties(device).uuid}"


def map_card(manifest: Manifest, device: torch.device) -> dict[str, Tensor]:
    """Each piece as a tensor [elements] on the card."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = {}
    for name, piece in manifest.pieces.items():
        arguments = list(pickle.loads(piece.handle))  # of our own generator
        arguments[_DEVICE] = index
        found[name] = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return found
