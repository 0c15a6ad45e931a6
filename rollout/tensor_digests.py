"""A policy as name -> digest of each tensor, which the learner and an engine can both compute and then compare.

Names and shapes are those of the payload (PEFT's for an adapter, the checkpoint's for weights). Values are those that
an engine computes with: in its type, and with alpha / r multiplied into an adapter's B, as vLLM does on loading. So an
engine cannot make the digests from the bytes that arrived; it has to read the tensors in use.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

COLUMNS = 64  # of a matrix that are read back; see columns_of
_SMALL = 1 << 20  # bytes; below that a thread costs more than it saves


def digest_of_tensor(tensor: Tensor) -> str:
    """sha256 hex of type, shape and values (bit for bit, so that -0.0 is not 0.0)."""
    values = tensor.detach().to("cpu").contiguous()
    found = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}".encode())
    found.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def digests_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name -> digest. Large tensors are hashed in threads, with no more of them held than there are threads."""
    threads = min(8, os.cpu_count() or 1)
    found: dict[str, str] = {}
    pending: deque[tuple[str, Future[str]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for name, tensor in tensors:
            if tensor.nbytes < _SMALL:
                found[name] = digest_of_tensor(tensor)
                continue
            # Copied here: on a card another thread's stream would not wait for the kernel that makes the tensor.
            pending.append((name, pool.submit(digest_of_tensor, tensor.detach().to("cpu"))))
            if len(pending) >= threads:
                first, digest = pending.popleft()
                found[first] = digest.result()
        found |= {name: digest.result() for name, digest in pending}
    return found


def read_of(weight: Tensor, version: int, dtype: torch.dtype) -> Tensor:
    """The part of a whole model's weight that is read back, in `dtype`: of a matrix the columns that columns_of names,
    in memory of their own."""
    if weight.dim() != 2:
        return weight.to(dtype)
    return columns_read(weight, columns_of(version, weight.shape[1]), dtype)


def columns_read(weight: Tensor, columns: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[rows, len(columns)] of a matrix, in `dtype` or its own."""
    # An engine may read by sums that begin with zero (see columns_of), which are never -0.0; adding zero does the same.
    return weight[:, columns.to(weight.device)].to(dtype or weight.dtype) + 0.0


@lru_cache(maxsize=16)  # a model has few widths and many matrices
def columns_of(version: int, width: int) -> Tensor:
    """[min(width, COLUMNS)] int64, ascending: columns of a matrix, other ones for each version.

    Whole weights are gigabytes, and a CPU's kernels keep them in a repacked copy, which can be read only by multiplying
    with unit vectors. That is exact, and for COLUMNS of them it costs as much as a prompt of that many tokens. A few
    columns are enough: the digest proves that all bytes arrived, and a matrix that a load left as it was differs in
    every column.
    """
    chosen = np.random.default_rng(version).choice(width, min(width, COLUMNS), replace=False)
    return torch.from_numpy(np.sort(chosen))
