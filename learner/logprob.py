"""Hidden states -> logprobs of given tokens and entropy, without ever holding a [tokens, vocab] tensor.

Letters: N tokens, V vocabulary, H hidden size. z = h W^T / T are the logits at temperature T, p = softmax(z).

The head W is frozen under LoRA and the loss reaches h only through one number per token, so that
    d logp[n] / d h[n] = (W[y[n]] - p[n] W) / T =: e[n]
can be formed in the forward pass, while p[n] is at hand, and is all that is kept: the backward pass is g[n] e[n].
Two matrix products in all instead of the three of recomputing the logits. The tiles over the vocabulary are folded
together by the online softmax of FlashAttention (2205.14135) with K = V = W; the running sums are float32, since
sums rounded to bfloat16 per tile bias the gradient. Entropy comes for free: H[n] = logsumexp(z[n]) - h[n]·(p[n] W) / T.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TOKEN_TILE = 512
VOCAB_TILE = 8192  # a tile of float32 logits is 16 MiB


def policy_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    token_tile: int = TOKEN_TILE,
    vocab_tile: int = VOCAB_TILE,
) -> tuple[Tensor, Tensor]:
    """Logprobs, differentiable in `hidden`, and entropies, which carry no gradient.

    Args:
        hidden: [N, H] states that predict the targets; float32, bfloat16 or float16.
        head: [V, H] output embedding of the same dtype; frozen.
        targets: [N] int64 token ids.
        temperature: the sampler's.

    Returns:
        ([N], [N]) float32, nats.

    Raises:
        ValueError: the head wants a gradient, which this operation does not compute.
    """
    if head.requires_grad:
        raise ValueError("head: must be frozen (its gradient is not computed here); call head.requires_grad_(False)")
    logprobs, entropy = _PolicyLogprobs.apply(hidden, head, targets, temperature, token_tile, vocab_tile)  # type: ignore[no-untyped-call]
    return logprobs, entropy


@torch.no_grad()
def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    token_tile: int = TOKEN_TILE,
    vocab_tile: int = VOCAB_TILE,
) -> Tensor:
    """[N] float32 logprobs without a gradient, with one matrix product; shapes as in policy_logprobs."""
    out = torch.empty(len(targets), device=hidden.device)
    for start in range(0, len(targets), token_tile):
        rows = slice(start, start + token_tile)
        logsumexp, _ = _fold(hidden[rows], head, temperature, vocab_tile, mean_row=False)
        out[rows] = _dot(hidden[rows], head[targets[rows]]) / temperature - logsumexp
    return out


class _PolicyLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, token_tile: int, vocab_tile: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = (torch.empty(len(targets), device=hidden.device) for _ in range(2))
        jacobian = torch.empty_like(hidden)
        for start in range(0, len(targets), token_tile):
            rows = slice(start, start + token_tile)
            h, label = hidden[rows], head[targets[rows]].float()
            logsumexp, mean_row = _fold(h, head, temperature, vocab_tile, mean_row=True)
            logprobs[rows] = _dot(h, label) / temperature - logsumexp
            entropy[rows] = logsumexp - _dot(h, mean_row) / temperature
            jacobian[rows] = label.sub_(mean_row).div_(temperature).to(hidden.dtype)
        ctx.save_for_backward(jacobian)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (jacobian,) = ctx.saved_tensors
        return (grad[:, None] * jacobian).to(jacobian.dtype), None, None, None, None, None


def _fold(
    hidden: Tensor, head: Tensor, temperature: float, vocab_tile: int, *, mean_row: bool
) -> tuple[Tensor, Tensor]:
    """([n] logsumexp of the logits, [n, H] p W or [n, 0]) of one tile of tokens, folded over the vocabulary's tiles."""
    n = len(hidden)
    top = torch.full((n,), -torch.inf, device=hidden.device)
    total = torch.zeros(n, device=hidden.device)
    mean = torch.zeros(n, hidden.shape[1] if mean_row else 0, device=hidden.device)
    for start in range(0, len(head), vocab_tile):
        rows = head[start : start + vocab_tile]
        logits = _product(hidden, rows.t()).div_(temperature)
        higher = torch.maximum(top, logits.amax(-1))
        decay = (top - higher).exp_()
        weights = logits.sub_(higher[:, None]).exp_()
        total.mul_(decay).add_(weights.sum(-1))
        if mean_row:
            mean.mul_(decay[:, None]).add_(_product(weights.to(head.dtype), rows))
        top = higher
    return total.log().add_(top), mean.div_(total[:, None])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32: logits rounded to bfloat16 would put an error of 2e-2 nats on a logprob."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # no CPU kernel has half inputs and a float32 output


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() * b.float()).sum(-1)
