"""Sampling on a CPU with one random number for a token, rather than one for each entry of the vocabulary.

vLLM takes the largest of the logits plus Gumbel noise, two logarithms for each entry: a tenth of an engine step of
SmolLM2-135M, whose vocabulary has 49,152. Here the token is where the cumulative probabilities pass a number that is
uniform in [0, 1) (inversion: Devroye, Non-Uniform Random Variate Generation, 1986, chapter III.2). The sums are of
float32 probabilities in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Entries that are summed before their sums are searched: of 49,152 a search in 384 sums, then in 128 entries.
_BLOCK = 128
_SMALL = 1024  # entries up to which one sum after the other is no slower
_BELOW_1 = torch.tensor(1 - 2**-52, dtype=torch.float64)  # so that a product with it is not rounded to the other factor


def install_cpu_sampling() -> None:
    """For every engine of this process."""
    from vllm.v1.sample.ops import topk_topp_sampler

    sampler: Any = topk_topp_sampler.TopKTopPSampler
    upstream = sampler.forward_cpu
    if not hasattr(upstream, "gleaner"):

        def forward_cpu(
            self: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            if self.logprobs_mode not in ("processed_logprobs", "raw_logprobs"):
                answer: tuple[Tensor, Tensor | None] = upstream(self, logits, generators, k, p)
                return answer
            kept = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
            logprobs = kept.log_softmax(dim=-1, dtype=torch.float32)
            uniform = torch.rand(len(logits), 1, dtype=torch.float64)
            rows = uniform.unbind()  # once: each look at a row by its number takes as long as its random number
            for row, generator in generators.items():
                rows[row].uniform_(generator=generator)
            return draw(logprobs, uniform), logprobs if self.logprobs_mode == "processed_logprobs" else None

        forward_cpu.gleaner = True  # type: ignore[attr-defined]
        sampler.forward_cpu = forward_cpu


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """The token of each row [rows] by its logprobs [rows, vocabulary], for numbers of [0, 1) [rows, 1] in float64.

    A token of probability 0 is never drawn. Of a row with NaN some token is.
    """
    probabilities = logprobs.exp()
    vocabulary = probabilities.shape[1]
    if vocabulary <= _SMALL:
        ends = probabilities.cumsum(-1, dtype=torch.float64)
        found = torch.searchsorted(ends, torch.minimum(uniform, _BELOW_1) * ends[:, -1:], right=True)
        return found.clamp_(max=vocabulary - 1).squeeze(1)
    whole = vocabulary // _BLOCK * _BLOCK
    sums = probabilities[:, :whole].view(len(probabilities), -1, _BLOCK).sum(-1)
    rest = probabilities[:, whole:].sum(-1, keepdim=True)
    ends = torch.cat([sums, rest], 1).cumsum(-1, dtype=torch.float64)
    point = torch.minimum(uniform, _BELOW_1) * ends[:, -1:]
    block = torch.searchsorted(ends, point, right=True).clamp_(max=ends.shape[1] - 1)
    point -= torch.where(block > 0, ends.gather(1, (block - 1).clamp_(min=0)), 0.0)
    entries = block * _BLOCK + torch.arange(_BLOCK)
    missing = entries >= vocabulary
    within = probabilities.gather(1, entries.clamp_(max=vocabulary - 1)).masked_fill_(missing, 0.0)
    inner = within.cumsum(-1, dtype=torch.float64)
    # The block's own sum, in float32, may be above that of its entries in float64.
    point = torch.minimum(point, _BELOW_1 * inner[:, -1:])
    return entries.gather(1, torch.searchsorted(inner, point, right=True).clamp_(max=_BLOCK - 1)).squeeze(1)
