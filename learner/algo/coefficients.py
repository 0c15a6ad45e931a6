"""The weight of a completion's tokens in the loss of an optimizer batch: what learner.loss.kind chooses. Pure numpy.

A function gets [completions] T, the tokens of every completion of the batch that has a reward, and returns
[completions] the coefficient of each of its tokens. It is worked out over the whole optimizer batch before that is
split, so that the gradient does not depend on the split. Completions that are skipped since their gradient is exactly 0
still count. Tokens of a truncated completion are no tokens of the loss with loss.mask_truncated: T counts the others,
so that dapo is the mean over them and grpo that of each completion's, while dr_grpo's constant stays what it is; in the
number of completions one counts even if none of it is trained on.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]
Coefficients = npt.NDArray[np.float64]


def dapo(lengths: Lengths, max_completion_length: int) -> Coefficients:
    """1 / (completion tokens of the batch): every token weighs the same. DAPO 2503.14476, equation 8."""
    return np.full(len(lengths), 1.0 / max(int(lengths.sum()), 1))


def dr_grpo(lengths: Lengths, max_completion_length: int) -> Coefficients:
    """1 / (completions * max_completion_length): a constant, hence unbiased. Dr.GRPO 2503.20783, section 3."""
    return np.full(len(lengths), 1.0 / max(len(lengths) * max_completion_length, 1))


def grpo(lengths: Lengths, max_completion_length: int) -> Coefficients:
    """1 / (T * completions): mean over the sequence, then over completions. DeepSeekMath 2402.03300, equation 3."""
    return 1.0 / (np.maximum(lengths, 1) * max(len(lengths), 1))


LOSSES: dict[str, Callable[[Lengths, int], Coefficients]] = {"dapo": dapo, "dr_grpo": dr_grpo, "grpo": grpo}
