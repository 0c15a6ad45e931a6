"""What a policy is, tensor by tensor, in a form that the learner and an engine can both give: name -> digest.

Names and shapes are those of the payload (PEFT's for an adapter, the checkpoint's for weights), values those that an
engine computes with: in its type, and of an adapter's B with the factor alpha / r multiplied in, as vLLM does on
loading. So an engine cannot say it from the bytes that arrived; it has to read the tensors in use.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

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
            pending.append((name, pool.submit(digest_of_tensor, tensor)))
            if len(pending) >= threads:
                first, digest = pending.popleft()
                found[first] = digest.result()
        found |= {name: digest.result() for name, digest in pending}
    return found


def read_of(weight: Tensor, version: int, dtype: torch.dtype) -> Tensor:
    """What is read back of one of the weights of a whole model, in `dtype`: of a matrix its columns_of, in memory of
    their own."""
    if weight.dim() != 2:
        return weight.to(dtype)
    # A sum that begins with zero has no -0.0 (see columns_of), hence the second zero.
    return weight[:, columns_of(version, weight.shape[1]).to(weight.device)].to(dtype) + 0.0


def columns_of(version: int, width: int) -> Tensor:
    """[min(width, COLUMNS)] int64, ascending: columns of a matrix, other ones for each version.

    Whole weights are gigabytes, and a CPU's kernels have them in a repacked copy, which is read by multiplying with
    unit vectors: exact, and COLUMNS of them cost as much as a prompt of that many tokens. That the bytes arrived is
    proven by their digest; a load that leaves a matrix as it was cannot hide in the columns that are not read.
    """
    chosen = np.random.default_rng(version).choice(width, min(width, COLUMNS), replace=False)
    return torch.from_numpy(np.sort(chosen))
