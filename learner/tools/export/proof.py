"""What weights say of recorded tokens, and whether merged weights say what the adapter on its base says.

Both are asked in float32, whatever the type of the weights that were written: what is left is the rounding of these,
and any fault of the merge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from learner.tools.export.errors import ExportFailed
from learner.tools.export.windows import Window

if TYPE_CHECKING:  # slow to import, and what is wrong with an export is told without it
    from torch import Tensor

# Most nats that the logprobs of tokens may differ by, by the type of the weights that were written: rms, and at one
# token. Measured: docs/export.md.
TOLERANCE = {"float32": (1e-4, 1e-3), "float16": (0.02, 0.2), "bfloat16": (0.1, 1.0)}
SHARE = 0.5  # of what the adapter moves, that rounding may take away


class Said(NamedTuple):
    """Of N tokens, float32 on the CPU.

    logprobs: [N] nats. likeliest: [N] the token that greedy decoding takes. margin: [N] nats by which it is likelier
    than the next.
    """

    logprobs: Tensor
    likeliest: Tensor
    margin: Tensor


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared, and how far apart it was, in nats.

    Attributes:
        dtype: of the weights that were written.
        recorded: whether the tokens are the run's, else random.
        moved: rms of adapter to base: what was learned, as far as it shows here; None of a model trained as a whole.
        greedy: tokens at which the likeliest is the same.
        flipped: those where it is another though the first was likelier by more than the tolerance of a token.
    """

    dtype: str
    tokens: int
    recorded: bool
    moved: float | None
    rms: float
    worst: float
    greedy: int
    flipped: int


def ask(lm: Any, windows: Sequence[Window]) -> Said:
    """What a causal language model of transformers says of the sampled tokens of the windows, one after the other."""
    import torch

    device, parts = lm.get_input_embeddings().weight.device, []
    with torch.no_grad():
        for ids, places in windows:
            at = torch.tensor(places, device=device)
            row = torch.tensor([ids], device=device)
            logs = lm(input_ids=row, use_cache=False).logits[0, at - 1].float().log_softmax(-1)
            best = logs.topk(2)
            own = logs.gather(1, row[0, at, None])[:, 0]
            parts.append(Said(own.cpu(), best.indices[:, 0].cpu(), (best.values[:, 0] - best.values[:, 1]).cpu()))
    return Said(*(torch.cat(part) for part in zip(*parts, strict=True)))


def compare(expected: Said, found: Said, base: Said | None, dtype: str, *, recorded: bool) -> Proof:
    """found: by the folder that was written. base: without the adapter."""
    apart = found.logprobs - expected.logprobs
    same = found.likeliest == expected.likeliest
    return Proof(
        dtype=dtype, tokens=len(apart), recorded=recorded,
        moved=None if base is None else _rms(expected.logprobs - base.logprobs),
        rms=_rms(apart), worst=float(apart.abs().max()), greedy=int(same.sum()),
        flipped=int((~same & (expected.margin > TOLERANCE[dtype][1])).sum()),
    )  # fmt: skip


def check(proof: Proof) -> None:
    """Raises ExportFailed."""
    rms, worst = TOLERANCE[proof.dtype]
    # Not <=: what is not a number is not within.
    if not (proof.rms <= rms and proof.worst <= worst) or proof.flipped:
        raise ExportFailed(
            f"OUT: the merged weights must say what the adapter says, within {rms:g} nats rms and {worst:g} at a token "
            f"({proof.dtype}), and differ by {proof.rms:.2g} rms and {proof.worst:.2g} at a token, of {proof.tokens} "
            f"tokens, with {proof.flipped} other greedy tokens; nothing was written: please report this with the model"
        )
    least = TOLERANCE["float32"][0]
    if proof.moved is not None and proof.rms > max(SHARE * proof.moved, least):
        raise ExportFailed(
            f"--dtype: {proof.dtype} weights must hold what was learned, and rounding takes away {proof.rms:.2g} nats "
            f"rms of the {proof.moved:.2g} by which the adapter moves logprobs; give --dtype float32, or --adapter-only"
        )


def _rms(values: Tensor) -> float:
    return math.sqrt(float(values.double().square().mean()))
