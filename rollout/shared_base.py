"""Lets the learner map the memory of a generator's base model (memory.layout: shared), so that one copy serves both.

On a CPU the memory is a file, on a card CUDA memory that is opened by handles. Digests prove that both processes see
the same content. rollout.types.Manifest describes the memory.
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

# Digests that are equal on a card and on a CPU: they are sums of integers, which are exact in any order.


CHUNK = 1 << 20  # elements summed at once as int64: 8 MiB, and twice as much again for positions and products
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> integer type


def digests_of_pieces(pieces: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each tensor, by name."""
    return {name: digest_of_piece(piece) for name, piece in pieces.items()}


@torch.no_grad()
def digest_of_piece(piece: Tensor) -> str:
    """Hex digest of dtype, size and content of a tensor without gaps.

    The content counts as the sum of the elements' bits, and that sum weighted by position, modulo 2**64. The digest is
    made to find an accident, not an attack.
    """
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


# A base model on a CPU lies in a file that other processes of the same user map read-only.
#
# The file has no name (memfd_create): it takes no room in /dev/shm, and disappears when nobody maps it any more, even
# if its owner was killed. Other processes open it for reading, so they cannot map it for writing; a write through their
# mapping ends them with SIGSEGV.

_ALIGNED = 64  # bytes: a cache line, and the widest vector register
_NAME = "gleaner-base"


class SharedFile:
    """Uninitialised memory for tensors. Mappings of other processes outlive this object."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """tensors: what there must be room for; only their dtypes and sizes count."""
        size = sum(_rounded(tensor.nbytes) for tensor in tensors)
        self._file = os.fdopen(os.memfd_create(_NAME), "r+b")
        os.ftruncate(self._file.fileno(), size)
        self._whole = torch.frombuffer(mmap.mmap(self._file.fileno(), size), dtype=torch.uint8)
        self._end = 0

    def place(self, like: Tensor) -> Tensor:
        """The next part of the file as a contiguous tensor with the dtype and shape of `like`."""
        start, self._end = self._end, self._end + _rounded(like.nbytes)
        return self._whole[start : start + like.nbytes].view(like.dtype).view(like.shape)

    def handle(self, tensor: Tensor) -> bytes:
        """The bytes by which map_file finds a tensor that was placed in this file."""
        where = {"pid": os.getpid(), "fd": self._file.fileno(), "start": tensor.data_ptr() - self._whole.data_ptr()}
        return json.dumps(where).encode()


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def map_file(manifest: Manifest) -> dict[str, Tensor]:
    """A read-only tensor [elements] on the shared memory for each piece, by name.

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
    """The whole file as a tensor [bytes] of uint8."""
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


# A base model on a card is shared by torch's own handles of CUDA memory, which another process on the card opens.
#
# This was written by reading torch/multiprocessing/reductions.py (the same in torch 2.11 to 2.14), and was run on an
# H200 with torch 2.13. The mapped memory is writable, and torch's allocator does not count it.

_DEVICE = 6  # index, among the arguments of rebuild_cuda_tensor, of the card's index
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def handles_of(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    """The handle of each tensor, by name. Each process needs handles of its own: torch counts one consumer for each.

    Raises WrongInput with expandable segments, whose handles need pidfd_getfd, which containers forbid.
    """
    wrong = [f"{name}={os.environ[name]}" for name in _SETTINGS if "expandable_segments:true" in _setting(name)]
    if wrong:
        raise WrongInput(
            f"memory.layout: shared needs a generator without expandable segments, got {', '.join(wrong)}; leave that "
            "out"
        )
    torch.cuda.synchronize()  # all writes must be done before another process reads
    # tensor.data has torch's class; with a parameter, whose class is vLLM's, the learner would have to import vLLM.
    return {name: pickle.dumps(_arguments(tensor.data.view(-1))) for name, tensor in tensors.items()}


def _arguments(tensor: Tensor) -> tuple[Any, ...]:
    """The arguments of rebuild_cuda_tensor that open this tensor."""
    arguments: tuple[Any, ...] = reduce_tensor(tensor)[1]  # type: ignore[no-untyped-call]
    return arguments


def _setting(name: str) -> str:
    return os.environ.get(name, "").lower().replace(" ", "")


def card_of(device: torch.device) -> str:
    """The card's UUID, since its index may differ from process to process."""
    return f"card {torch.cuda.get_device_properties(device).uuid}"


def map_card(manifest: Manifest, device: torch.device) -> dict[str, Tensor]:
    """A tensor [elements] on the card for each piece, by name."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = {}
    for name, piece in manifest.pieces.items():
        arguments = list(pickle.loads(piece.handle))  # pickled by the run's own generator
        arguments[_DEVICE] = index
        found[name] = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return found
