"""Memory as a tensor of bytes."""

import mmap
import warnings

import torch
from torch import Tensor


def as_bytes(memory: bytes | memoryview | mmap.mmap) -> Tensor:
    """[bytes] uint8, on the memory itself. It may be memory that cannot be written, of which torch would warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(memory, dtype=torch.uint8)
