"""A loss of your own, by its paper: learner.loss.ratio=examples/my_loss.py:topr (docs/losses.md)."""

from torch import Tensor

from learner.algo.loss import Tokens


def topr(tokens: Tokens, cap: float = 1.0) -> tuple[Tensor, Tensor]:
    """Tapered off-policy REINFORCE (Le Roux et al. 2503.14286). A completion better than its group's mean has weight 1;
    a worse one its ratio, at most `cap`, so that it loses its weight as the policy stops writing it."""
    ratio = tokens.over_completions("sum").sg_ratio
    worse = tokens.advantages < 0
    weight = ratio.clamp(max=cap).where(worse, 1.0)
    return tokens.weighted(weight), worse & (ratio > cap)
