"""The weight w of each token that a surrogate's gradient has, c * w * A * d log pi, found by autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from learner.algo.loss import Tokens
from learner.algo.surrogates import SURROGATES


class Weighted(NamedTuple):
    """All [N]."""

    weight: Tensor  # w
    objective: Tensor
    clipped: Tensor


Ratio = Callable[[Tensor, Tensor, Tensor, Any], Weighted]  # log rho [N], A [N], T [completions], bounds


def _by_autograd(name: str) -> Ratio:
    row = SURROGATES[name]

    def found(log_ratio: Tensor, advantage: Tensor, lengths: Tensor, bounds: Any) -> Weighted:
        tokens = Tokens.of(torch.zeros_like(log_ratio), log_ratio, advantage, lengths)
        objective, clipped = row.function(tokens, **{one: bounds[one] for one in row.settings})
        (slope,) = torch.autograd.grad(objective.sum(), tokens.unit)
        return Weighted(slope / advantage, objective.detach(), clipped)

    return found


RATIOS = {name: _by_autograd(name) for name in SURROGATES}
BOUNDS = {name: row.settings for name, row in SURROGATES.items()}
clip, gspo = RATIOS["clip"], RATIOS["gspo"]
