"""What a policy is, tensor by tensor, in a form that the learner and an engine can both give: name -> digest.

Names and shapes are those of the payload (PEFT's for an adapter, the checkpoint's for weights), values those that an
engine computes with: in its type, and of an adapter's B with the factor alpha / r multiplied in, as vLLM does on
loading. So an engine cannot say it from the bytes that arrived; it has to read the tensors in use.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

COLUMNS = 64  # of a repacked matrix that are read back; see columns_of
_COLUMNS = " (columns)"
_SMALL = 1 << 20  # bytes; below that a thread costs more than it saves


class Held(NamedTuple):
    """A policy as one process holds it.

    tensors: name -> sha256 hex (see digest_of_tensor). unread: names of what an engine holds in a layout that it cannot
    read back.
    """

    tensors: dict[str, str]
    unread: tuple[str, ...] = ()


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


def columns_name(name: str) -> str:
    """Under which the digest of a matrix's columns_of goes, where an engine cannot read all of it at little cost."""
    return name + _COLUMNS


def base_name(name: str) -> str:
    """The name of the tensor itself."""
    return name.removesuffix(_COLUMNS)


def forms_of(name: str, weight: Tensor, version: int) -> Iterator[tuple[str, Tensor]]:
    """The forms in which an engine may give a weight: as it is, and a matrix by its columns_of."""
    yield name, weight
    if weight.dim() == 2:
        # A sum that begins with zero has no -0.0, hence the second zero.
        yield columns_name(name), weight[:, columns_of(version, weight.shape[1]).to(weight.device)] + 0.0


def columns_of(version: int, width: int) -> Tensor:
    """[min(width, COLUMNS)] int64, ascending: columns of a matrix, other ones for each version.

    A kernel's repacked copy is read by multiplying with unit vectors, which is exact; COLUMNS of them cost as much as a
    prompt of that many tokens. A step changes so many weights that a whole matrix which missed it cannot hide in the
    columns that are not read.
    """
    chosen = np.random.default_rng(version).choice(width, min(width, COLUMNS), replace=False)
    return torch.from_numpy(np.sort(chosen))
