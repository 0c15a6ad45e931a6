"""Micro-batches that hold what a loss looks at, and nothing for a model."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.batch.micro_batch import MicroBatch


def batch_of(
    behavior: Tensor,
    advantages: Tensor,
    coefficients: Tensor,
    versions: list[int] | None = None,
    lengths: list[int] | None = None,
) -> MicroBatch:
    n = len(behavior)
    zeros = torch.zeros(n, dtype=torch.int64)
    version = torch.tensor(versions or [0] * n, dtype=torch.int32)
    sizes = torch.tensor(lengths or [n])
    return MicroBatch(zeros[None], zeros, zeros, behavior, version, advantages, coefficients, sizes, zeros)
