"""A base on a CPU: memory of its owner that other processes of the same user may map, for reading only.

It is a file without a name (memfd_create): it takes no room in /dev/shm, and is gone when nobody maps it any more, even
if its owner was killed. Others open it for reading, so that the system refuses to map it for writing, and a write
through their mapping ends them with SIGSEGV.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rollout.raw_bytes import as_bytes
from rollout.shared_base.manifest import BaseNotShared, Manifest

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


def map_pieces(manifest: Manifest) -> dict[str, Tensor]:
    """Each piece as a read-only tensor [elements].

    Raises BaseNotShared if the owner or its file is gone, or may not be opened.
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
        raise BaseNotShared(
            f"memory.base: shared: the generator's base cannot be mapped ({path}: {error}); both processes must run in "
            "one container, as one user; or set memory.base=own"
        ) from error
    return as_bytes(view)
