"""The tokens of a batch before which the policy was least certain: at these a completion takes one way or another.
Wang et al. 2506.01939, section 5, learn from the 20 % of highest entropy alone. Letters: as in learner.batch.rows.
"""

import math
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor


class Uncertain(NamedTuple):
    """tokens: [M] those that the objective has. least: the lowest entropy among them, nats."""

    tokens: Bool[Tensor, " M"]
    least: float


def most_uncertain(entropies: Float[Tensor, " M"], share: float) -> Uncertain | None:
    """Those of the given share of the tokens whose entropies are highest, rounded up to a whole number, and all that
    are equal to the lowest of them. nan: no token of the loss. None where there is none."""
    known = entropies[~entropies.isnan()]
    if not len(known):
        return None
    least = known.topk(math.ceil(share * len(known))).values[-1]
    return Uncertain(entropies >= least, float(least))
