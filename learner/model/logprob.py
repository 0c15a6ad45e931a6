"""Logprobs of given tokens, and entropies, from hidden states, without ever holding a [tokens, vocabulary] tensor.

Letters: N tokens, V vocabulary, H hidden size. W is the output embedding (the head), h a hidden state, r = h W^T. The
logits at temperature T are z = f(r) / T, with the f that the model applies to r (mostly f(r) = r); p = softmax(z).

Under LoRA the head W is frozen, and the loss depends on h through one number per token, so that
    d logp[n] / d h[n] = (f'(r[n, y]) W[y] - sum_v p[n, v] f'(r[n, v]) W[v]) / T =: e[n]
can be computed in the forward pass, where p[n] is known. Only e[n] is kept; the backward pass is g[n] e[n]. This takes
two matrix products instead of the three of recomputing the logits. The tiles over the vocabulary are combined by the
online softmax of FlashAttention (2205.14135) with K = V = W. The running sums are float32, since sums rounded to
bfloat16 per tile would bias the gradient. Where f' is constant, the entropy needs no further product:
H[n] = logsumexp(z[n]) - f' h[n]·(p[n] W) / T.

If the head is trained, its gradient is a sum over tokens of terms too large to keep, so the backward pass computes the
logits once more: d logp[n] / d r[n] = (onehot(y[n]) - p[n]) f'(r[n]) / T. This takes four matrix products.

The KL to a teacher over its k likeliest tokens (learner.algo.loss.kl_over_top) needs the logprobs of k tokens more.
Their logits are picked from the tiles as that of y is, and their derivatives c[n, i] are known once p[n] is, so
    d kl[n] / d h[n] = sum_i c[n, i] (f'(r[n, i]) W[i] - sum_v p[n, v] f'(r[n, v]) W[v]) / T
is kept as e[n] is; the k rows of the head are read for a few tokens at a time.
"""

import logging
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learner.algo.loss import kl_over_top

log = logging.getLogger("learner")

# The function f of some models: f(r) = scale r, or with a cap f(r) = cap tanh(scale r / cap). Granite and Cohere scale;
# Gemma 2 caps (2408.00118, section 2: "logit soft-capping").

# Names of the scale in transformers' configs; logits are multiplied by the value to the power of this exponent.
SCALES = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}
MULTIPLIES = ("hyperclovax",)  # model types that multiply by logits_scaling, by which other models divide
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


class Logits(NamedTuple):
    """The function f that makes logits of r = head @ hidden, both in float32."""

    scale: float = 1.0
    cap: float | None = None

    def of_(self, products: Tensor, temperature: float) -> Tensor:
        """Computes f(products) / temperature in place."""
        if self.cap is None:  # usually temperature and scale are 1, and a pass over the logits is saved
            return products if temperature == self.scale else products.div_(temperature / self.scale)
        return products.mul_(self.scale / self.cap).tanh_().mul_(self.cap / temperature)

    def bend_(self, logits: Tensor, temperature: float) -> Tensor:
        """Computes f'(r) / scale = 1 - (f(r) / cap)^2 in place of `logits`, f(r) / temperature; only with a cap."""
        assert self.cap is not None
        return logits.mul_(temperature / self.cap).square_().neg_().add_(1.0)


PLAIN = Logits()


def logits_of(config: Any) -> Logits:
    """Returns the Logits of a transformers text config. learner.model.packing_check.check_head tries whether they are
    the model's."""
    scale, caps = 1.0, [cap for name in CAPS if (cap := getattr(config, name, None))]
    for name, exponent in SCALES.items():
        power = 1 if config.model_type in MULTIPLIES else exponent
        scale *= float(getattr(config, name, None) or 1.0) ** power
    return Logits(scale, float(caps[0]) if caps else None)


# Access to the output embedding, which may be whole or sharded over several ranks.

P = ParamSpec("P")
T = TypeVar("T")

GATHERED = "gathered"  # name of the method that a sharded head gets


def with_head(
    lm: Any, operation: Callable[Concatenate[Tensor, Tensor, P], T], hidden: Tensor, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Returns operation(hidden, head, ...) with the head [V, H]. With a sharded base (learner.model.bases.sharded) the
    head is gathered for the operation, and if it is trained once more for the backward pass; both are collective."""
    module = lm.get_output_embeddings()
    gathered = getattr(module, GATHERED, None)
    if gathered is None:
        return operation(hidden, module.weight, *args, **kwargs)
    answer: T = gathered(operation, hidden, *args, **kwargs)
    return answer


def gather_in_operations(head: nn.Module) -> None:
    """Gives a head that FSDP2 has sharded a method that computes with the gathered weight. FSDP2 gathers a weight when
    a registered method of its module is called, not when the weight is used."""
    from torch.distributed.fsdp import register_fsdp_forward_method  # imported here: slow, and few runs use it

    def gathered(module: Any, operation: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return operation(hidden, module.weight, *args, **kwargs)

    setattr(head, GATHERED, MethodType(gathered, head))
    register_fsdp_forward_method(head, GATHERED)


def decoder_of(lm: Any) -> Any:
    """Returns the part of a causal language model that computes its final hidden states: the model without its output
    embedding. It is `lm` itself if transformers cannot tell."""
    if lm.base_model is not lm:
        return lm.base_model
    return getattr(lm, "model", lm)  # Llama 4's base_model_prefix names another module


def begin_anew(lm: Any) -> None:
    """Resets FSDP2 after a pass over a sharded base that failed half-way: gathered weights are freed. Without it
    FSDP2's outermost modules would no longer sum gradients."""
    for module in (decoder_of(lm), lm.get_output_embeddings()):
        if hasattr(module, "reset_iter_state"):
            module.reset_iter_state()


def check_ids(head: Tensor, highest: int) -> None:
    """Raises ValueError if the highest token id is beyond the vocabulary of the head [V, H]."""
    if highest >= len(head):
        raise ValueError(
            f"token ids: must be below the vocabulary of model.path, {len(head)}, got {highest}; the rollouts were "
            "made with another tokenizer or model"
        )


# Tokens and vocabulary entries of a tile, whose float32 logits take 16 MiB on a CPU and 64 MiB on a GPU. Each tile of
# tokens reads the whole head twice: with 512 tokens, reading would take an H100 half as long again as the products.
TOKEN_TILE, CARD_TOKEN_TILE, VOCAB_TILE = 512, 2048, 8192


class _How(NamedTuple):
    """The arguments of the computation that are not tensors."""

    logits: Logits
    temperature: float
    token_tile: int
    vocab_tile: int
    cuda: bool
    kernel: bool  # whether Triton's kernel takes the tiles
    wide: torch.dtype  # of logits and sums: float32, and float64 for states in it, so that tests can see past rounding

    @classmethod
    def on(cls, hidden: Tensor, logits: Logits, temperature: float, token_tile: int | None, vocab_tile: int) -> "_How":
        """Chooses by the device of `hidden`; the tile of tokens where it is None."""
        cuda = hidden.is_cuda
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        kernel = cuda and wide == torch.float32
        kernel = kernel and (hidden.is_meta or _kernel_agrees(hidden.device, hidden.dtype, vocab_tile))
        tile = token_tile or (CARD_TOKEN_TILE if cuda else TOKEN_TILE)
        return cls(logits, temperature, tile, vocab_tile, cuda, kernel, wide)

    def numbers(self, count: int, of: Tensor) -> list[Tensor]:
        """Four tensors for a number of each token."""
        return [torch.zeros(count, device=of.device, dtype=self.wide) for _ in range(4)]


def policy_logprobs(
    hidden: Float[Tensor, "N H"],
    head: Float[Tensor, "V H"],
    targets: Int[Tensor, " N"],
    temperature: float,
    *,
    logits: Logits = PLAIN,
    token_tile: int | None = None,
    vocab_tile: int = VOCAB_TILE,
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """Returns float32 logprobs and entropies, in nats. Logprobs are differentiable once in `hidden`, and in `head` if
    it requires a gradient; entropies have no gradient.

    Args:
        hidden: hidden states that predict the targets; float32, bfloat16 or float16.
        head: output embedding of the same dtype; with tied embeddings the embedding matrix itself.
        targets: int64 token ids.
        temperature: the sampling temperature.
        logits: how the model makes logits of head @ hidden.
        token_tile: tokens of a tile; None: it depends on the device.
        vocab_tile: vocabulary entries of a tile.
    """
    kind = _TrainedHead if head.requires_grad else _FrozenHead
    how = _How.on(hidden, logits, temperature, token_tile, vocab_tile)
    logprobs, entropy, _, _ = kind.apply(hidden, head, targets, how, None)  # type: ignore[no-untyped-call]
    return logprobs, entropy


class Top(NamedTuple):
    """A teacher's k likeliest tokens in the place of each token."""

    ids: Int[Tensor, "N k"]  # int64
    logprobs: Float[Tensor, "N k"]  # float32, nats, under the teacher


class TaughtLogprobs(NamedTuple):
    """What the policy gives where the KL is over a teacher's likeliest tokens, float32."""

    logprobs: Float[Tensor, " N"]  # nats, with a gradient
    entropy: Float[Tensor, " N"]  # nats
    kl: Float[Tensor, " N"]  # KL(policy || teacher) over these and all others as one, nats, with a gradient
    mass: Float[Tensor, " N"]  # the policy's probability of these tokens together


def taught_logprobs(
    hidden: Float[Tensor, "N H"],
    head: Float[Tensor, "V H"],
    targets: Int[Tensor, " N"],
    top: Top,
    temperature: float,
    *,
    logits: Logits = PLAIN,
    token_tile: int | None = None,
    vocab_tile: int = VOCAB_TILE,
) -> TaughtLogprobs:
    """Returns what policy_logprobs does, and the KL to a teacher over its likeliest tokens; for arguments see there."""
    kind = _TrainedHead if head.requires_grad else _FrozenHead
    how = _How.on(hidden, logits, temperature, token_tile, vocab_tile)
    return TaughtLogprobs(*kind.apply(hidden, head, targets, how, top))  # type: ignore[no-untyped-call]


@torch.no_grad()
def token_logprobs(
    hidden: Float[Tensor, "N H"],
    head: Float[Tensor, "V H"],
    targets: Int[Tensor, " N"],
    temperature: float,
    *,
    logits: Logits = PLAIN,
    token_tile: int | None = None,
    vocab_tile: int = VOCAB_TILE,
) -> Float[Tensor, " N"]:
    """Returns float32 logprobs (nats) without a gradient, by one matrix product; for arguments see policy_logprobs."""
    how = _How.on(hidden, logits, temperature, token_tile, vocab_tile)
    return _folded(hidden, head, targets, how, "logprob")


@torch.no_grad()
def token_entropies(
    hidden: Float[Tensor, "N H"],
    head: Float[Tensor, "V H"],
    targets: Int[Tensor, " N"],
    temperature: float,
    *,
    logits: Logits = PLAIN,
    token_tile: int | None = None,
    vocab_tile: int = VOCAB_TILE,
) -> Float[Tensor, " N"]:
    """Returns float32 entropies (nats) of the distributions that the states predict, at the cost of token_logprobs; for
    arguments see policy_logprobs."""
    how = _How.on(hidden, logits, temperature, token_tile, vocab_tile)
    return _folded(hidden, head, targets, how, "entropy")


def _folded(hidden: Tensor, head: Tensor, targets: Tensor, how: _How, want: str) -> Float[Tensor, " N"]:
    """Returns the field `want` of _Fold for all tokens."""
    out = torch.empty(len(targets), device=hidden.device, dtype=how.wide)
    for rows in _tiles(len(targets), how.token_tile):
        out[rows] = getattr(_fold(hidden[rows], head, targets[rows, None], how, want), want)
    return out


Outputs = tuple[Tensor, Tensor, Tensor, Tensor]  # as TaughtLogprobs; without a teacher KL and mass are 0


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, how: _How, top: Top | None) -> Outputs:
        logprobs, entropy, kl, mass = how.numbers(len(targets), hidden)
        jacobian = torch.empty_like(hidden)
        pull = None if top is None else torch.empty_like(hidden)  # d kl / d h
        slope = how.logits.scale / how.temperature
        for rows in _tiles(len(targets), how.token_tile):
            h = hidden[rows]
            fold = _fold(h, head, _asked(targets, top, rows), how, "mean_row")
            logprobs[rows] = fold.logprob
            if top is not None and pull is not None:
                over = kl_over_top(fold.others, top.logprobs[rows].to(how.wide))
                kl[rows], mass[rows] = over.kl, over.mass
                weights = over.slopes
                if how.logits.cap is not None:
                    logits = fold.others + (fold.top + fold.log_total)[:, None]
                    weights = weights * how.logits.bend_(logits, how.temperature)
                moved = _weighted_rows(head, top.ids[rows], weights, how)
                moved.addcmul_(fold.mean_row, over.slopes.sum(-1, keepdim=True), value=-1)
                pull[rows] = moved.mul_(slope).to(hidden.dtype)
                del over, weights, moved
            own = head[targets[rows]].to(how.wide)
            if how.logits.cap is None:
                entropy[rows] = fold.top + fold.log_total - (h.float() * fold.mean_row).sum(-1) * slope
            else:
                entropy[rows] = fold.entropy
                own *= how.logits.bend_(fold.logprob + fold.top + fold.log_total, how.temperature)[:, None]
            jacobian[rows] = own.sub_(fold.mean_row).mul_(slope).to(hidden.dtype)
        ctx.save_for_backward(jacobian, *([] if pull is None else [pull]))
        ctx.mark_non_differentiable(entropy, mass)
        return logprobs, entropy, kl, mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor, of_kl: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        jacobian, *pull = ctx.saved_tensors
        # Saved tensors are overwritten: nothing else uses them, and autograd raises if a second backward pass would.
        jacobian.mul_(grad[:, None])
        for one in pull:
            jacobian.add_(one.mul_(of_kl[:, None]))
        return jacobian, None, None, None, None


class _TrainedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, how: _How, top: Top | None) -> Outputs:
        logprobs, entropy, kl, mass = how.numbers(len(targets), hidden)
        greatest, log_total, _, _ = how.numbers(len(targets), hidden)
        slopes = []
        for rows in _tiles(len(targets), how.token_tile):
            fold = _fold(hidden[rows], head, _asked(targets, top, rows), how, "entropy")
            logprobs[rows], entropy[rows], greatest[rows], log_total[rows] = fold[:4]
            if top is not None:
                over = kl_over_top(fold.others, top.logprobs[rows].to(how.wide))
                kl[rows], mass[rows] = over.kl, over.mass
                slopes.append(over.slopes)
        taught = [] if top is None else [top.ids, torch.cat([top.logprobs[:0].to(how.wide), *slopes])]
        ctx.save_for_backward(hidden, head, targets, greatest, log_total, *taught)
        ctx.how = how
        ctx.mark_non_differentiable(entropy, mass)
        return logprobs, entropy, kl, mass

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor, of_kl: Tensor, __: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, targets, top, log_total, *taught = ctx.saved_tensors
        how: _How = ctx.how
        scale = how.logits.scale / how.temperature
        # Tokens and their slopes. Those of the teacher are by themselves, as the target may be one of them: two numbers
        # added to the same place at once come in any order on a card.
        named = [(targets[:, None], (grad * scale)[:, None])]
        if taught:
            named.append((taught[0], taught[1] * (of_kl * scale)[:, None]))
        slope = torch.cat([slopes for _, slopes in named], 1).sum(-1, keepdim=True)
        # The outer loop is over the vocabulary, so that the float32 sums are [N, H] and a tile of the head, not [V, H].
        grad_hidden, grad_head = torch.zeros_like(hidden, dtype=how.wide), torch.empty_like(head)
        for words in _tiles(len(head), how.vocab_tile):
            weight, total = _operand(head[words], how), torch.zeros_like(head[words], dtype=how.wide)
            start = torch.full((1,), words.start, device=targets.device)
            places = [(*_within(ids, start, how.vocab_tile), slopes) for ids, slopes in named]
            for rows in _tiles(len(targets), how.token_tile):
                logits = how.logits.of_(_product(hidden[rows], weight.t(), how), how.temperature)
                bend = None if how.logits.cap is None else how.logits.bend_(logits.clone(), how.temperature)
                logits.sub_(top[rows, None]).sub_(log_total[rows, None]).exp_().mul_(-slope[rows])
                for place, inside, slopes in places:
                    own = torch.where(inside[rows, :, 0], slopes[rows], 0.0)
                    logits.scatter_add_(1, place[rows, :, 0], own)
                rounded = (logits if bend is None else logits.mul_(bend)).to(head.dtype)
                grad_hidden[rows] += _product(rounded, weight, how)
                total += _product(rounded.t(), hidden[rows], how)
                del logits, bend, rounded  # freed before the next tile is allocated
            grad_head[words] = total.to(head.dtype)
        return grad_hidden.to(hidden.dtype), grad_head, None, None, None


def _asked(targets: Tensor, top: Top | None, rows: slice) -> Int[Tensor, "n m"]:
    """Returns the tokens whose logprobs are asked for: the target, and behind it the teacher's."""
    own = targets[rows, None]
    return own if top is None else torch.cat([own, top.ids[rows]], 1)


READ_AT_ONCE = 2**22  # elements of the head that are read for a few tokens: 16 MiB in float32


def _weighted_rows(
    head: Float[Tensor, "V H"], ids: Int[Tensor, "n k"], weights: Float[Tensor, "n k"], how: _How
) -> Float[Tensor, "n H"]:
    """Returns for each token the weighted sum of k rows of the head."""
    sums = torch.empty(len(ids), head.shape[1], device=head.device, dtype=how.wide)
    for some in _tiles(len(ids), max(READ_AT_ONCE // (ids.shape[1] * head.shape[1]), 1)):
        sums[some] = torch.bmm(weights[some, None], head[ids[some]].to(how.wide)).squeeze(1)
    return sums


class _Fold(NamedTuple):
    """What the forward pass needs of the logits of one tile of tokens, float32."""

    logprob: Float[Tensor, " n"]  # logprobs of the first tokens
    entropy: Float[Tensor, " n"]
    top: Float[Tensor, " n"]  # greatest logit
    log_total: Float[Tensor, " n"]  # logsumexp of the logits minus `top`; added to a great `top` it would lose its bits
    mean_row: Float[Tensor, "n H"]  # p W; with a cap (p f'(r) / scale) W; H = 0 where it is not wanted
    others: Float[Tensor, "n k"]  # logprobs of the other tokens


class _Sums(NamedTuple):
    """Sums over the vocabulary, all [n], which each of its tiles changes in place."""

    top: Tensor  # greatest logit until now
    total: Tensor  # sum of exp(z - top)
    spread: Tensor  # sum of exp(z - top) (z - top); only where the entropy is asked for, or there is a cap

    @classmethod
    def of(cls, n: int, device: torch.device, dtype: torch.dtype) -> "_Sums":
        lowest = torch.full((n,), torch.finfo(dtype).min, device=device, dtype=dtype)
        return cls(lowest, *torch.zeros(2, n, device=device, dtype=dtype))


def _fold(
    hidden: Float[Tensor, "n H"], head: Float[Tensor, "V H"], targets: Int[Tensor, "n m"], how: _How, want: str
) -> _Fold:
    """Computes _Fold tile by tile over the vocabulary; `targets` are m tokens for each state.

    `want`: logprob, entropy or mean_row. The logprob is always computed; the entropy also with mean_row if there is a
    cap. Other fields must not be read.
    """
    sums, width = _Sums.of(len(hidden), hidden.device, how.wide), hidden.shape[1] if want == "mean_row" else 0
    mean = torch.zeros(len(hidden), width, device=hidden.device, dtype=how.wide)
    starts = torch.arange(0, len(head), how.vocab_tile, device=hidden.device)
    places, inside = _within(targets, starts, how.vocab_tile)
    labels = []
    take = _take_by_kernel if how.kernel else _take
    for place, words in zip(places.unbind(-1), _tiles(len(head), how.vocab_tile), strict=True):
        weight = _operand(head[words], how)
        products = _product(hidden, weight.t(), how)
        # A token's logit is taken from the product that enters the sum, so that rounding errors cancel.
        label, decay, weights = take(products, place, sums, how, want, head.dtype)
        labels.append(label)
        del products  # freed before the next tile is allocated
        if weights is not None:
            torch.addcmul(_product(weights, weight, how), mean, decay[:, None], out=mean)
        del weight, weights
    top, total, spread = sums
    log_total, label = total.log(), torch.where(inside, torch.stack(labels, -1), 0.0).sum(-1)
    found = label - top[:, None] - log_total[:, None]
    entropy, mean = log_total - spread / total, mean.div_(total[:, None])
    return _Fold(found[:, 0], entropy, top, log_total, mean, found[:, 1:])


Taken = tuple[Tensor, Tensor, Tensor | None]  # tokens' logits [n, m]; exp(old top - new top) [n]; weights [n, W]


def _take(
    products: Float[Tensor, "n W"], place: Int[Tensor, "n m"], sums: _Sums, how: _How, want: str, dtype: torch.dtype
) -> Taken:
    """Adds a tile of W words to the sums. products: head @ hidden, which is overwritten. place: those of each state's
    tokens in this tile. The weights, in this dtype, are exp(z - top), with a cap times f'(r) / scale; only for
    mean_row."""
    top, total, spread = sums
    bent = want == "mean_row" and how.logits.cap is not None
    logits = how.logits.of_(products, how.temperature)
    label = logits.gather(1, place)
    higher = torch.maximum(top, logits.amax(-1))
    lift = top - higher
    decay = lift.exp()
    logits.sub_(higher[:, None])
    weights = logits.exp() if want == "entropy" or bent else logits.exp_()
    if want == "entropy" or bent:
        spread.addcmul_(lift, total).mul_(decay).add_(torch.linalg.vecdot(logits, weights))
    total.mul_(decay).add_(weights.sum(-1))
    if bent:
        weights.mul_(how.logits.bend_(logits.add_(higher[:, None]), how.temperature))
    top.copy_(higher)
    return label, decay, weights.to(dtype) if want == "mean_row" else None


# The same on a card by one Triton kernel, which reads a tile of products once and writes its weights: of a head in 16
# bits 96 MiB for 2048 tokens and 8192 words, where the operations of `_take` move 480 (608 with a temperature). A
# program of the kernel has one token: its row stays in registers.


def _take_by_kernel(
    products: Float[Tensor, "n W"], place: Int[Tensor, "n m"], sums: _Sums, how: _How, want: str, dtype: torch.dtype
) -> Taken:
    """Does what `_take` does, on a card; the kernel picks the first of a state's tokens."""
    scale, cap = how.logits.scale / how.temperature, (how.logits.cap or 0.0) / how.temperature
    label, decay, weights = _take_tile(products, place[:, :1], *sums, scale, cap, dtype if want == "mean_row" else None)
    if place.shape[1] > 1:
        label = torch.cat([label, how.logits.of_(products.gather(1, place[:, 1:]), how.temperature)], 1)
    return label, decay, weights if want == "mean_row" else None


@torch.library.custom_op("gleaner::take_tile", mutates_args=("top", "total", "spread"))
def _take_tile(
    products: Tensor, place: Tensor, top: Tensor, total: Tensor, spread: Tensor, scale: float, cap: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The logits are scale r, or cap tanh(scale r / cap) with a cap that is not 0. dtype: that of the weights, None:
    there are none."""
    label, decay, weights = _meta_take_tile(products, place, top, total, spread, scale, cap, dtype)
    width = products.shape[1]
    block = 1 << (width - 1).bit_length()
    # Triton launches on the current device: a process of gleaner sees one card.
    _kernel()[(len(products),)](
        products, place, top, total, spread, label, decay, weights, width, place.stride(0), scale, cap,
        CAPPED=cap != 0.0, WEIGHTED=dtype is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return label, decay, weights


@_take_tile.register_fake
def _meta_take_tile(
    products: Tensor, place: Tensor, top: Tensor, total: Tensor, spread: Tensor, scale: float, cap: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    weights = products.new_empty(products.shape if dtype is not None else (0,), dtype=dtype)
    return products.new_empty(len(place), 1), torch.empty_like(top), weights


@cache
def _kernel() -> Any:
    """Returns Triton's kernel. Triton is imported here, since it is there only with a GPU."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def take(  # type: ignore[no-untyped-def]
        products, place, top, total, spread, label, decay, weights, width, step, scale, cap,
        CAPPED: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        words = tl.arange(0, BLOCK)
        own = tl.load(products + row * width + words, mask=words < width, other=0.0) * scale
        target = tl.load(products + row * width + tl.load(place + row * step)) * scale
        if CAPPED:  # tanh(x) = 2 sigmoid(2 x) - 1
            own = cap * (2 * tl.sigmoid(2 * own / cap) - 1)
            target = cap * (2 * tl.sigmoid(2 * target / cap) - 1)
        tl.store(label + row, target)
        logits = tl.where(words < width, own, float("-inf"))
        before, sum_before = tl.load(top + row), tl.load(total + row)
        higher = tl.maximum(before, tl.max(logits, 0))
        lift = before - higher
        fall = tl.exp(lift)
        found = tl.exp(logits - higher)
        over = tl.where(words < width, own - higher, 0.0)
        tl.store(top + row, higher)
        tl.store(decay + row, fall)
        tl.store(spread + row, (tl.load(spread + row) + lift * sum_before) * fall + tl.sum(found * over, 0))
        tl.store(total + row, sum_before * fall + tl.sum(found, 0))
        if WEIGHTED:
            if CAPPED:
                found *= 1 - (own / cap) * (own / cap)
            tl.store(weights + row * width + words, found.to(weights.dtype.element_ty), mask=words < width)

    return take


@cache
def _kernel_agrees(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Tries on a card whether the kernel does what `_take` does for a head of this dtype and tiles of this width, and
    tells if it does not."""
    random = torch.Generator(device).manual_seed(0)
    products = torch.randn(4, width, device=device, generator=random) * 10
    place = torch.randint(0, width, (4, 3), device=device, generator=random)[:, 1:2]  # a column, as in _fold
    for logits, want in ((PLAIN, "mean_row"), (Logits(0.5, 3.0), "mean_row"), (PLAIN, "entropy")):
        how = _How(logits, 0.7, 4, width, True, True, torch.float32)
        found, wanted = (_Sums(*(torch.full((4,), x, device=device) for x in (2.0, 3.0, 0.5))) for _ in range(2))
        try:
            own: list[Any] = [*_take_by_kernel(products, place, found, how, want, dtype), *found]
            own = [one if one is None else one.cpu() for one in own]  # an error of the card comes up here
        except Exception as error:  # Triton may raise any exception
            log.warning("the head's kernel: not used, torch's operations are: %s: %s", type(error).__name__, error)
            return False
        others: list[Any] = [*_take(products.clone(), place, wanted, how, want, dtype), *wanted]
        pairs = [(a, b.cpu()) for a, b in zip(own, others, strict=True) if b is not None]
        if logits.cap is None and want == "mean_row":
            pairs.pop()  # the spread is not asked for
        rough = torch.finfo(dtype).eps  # the weights may be rounded to the next number
        if not all(torch.allclose(a, b, rtol=max(1e-4, rough * (a.dtype == dtype)), atol=1e-5) for a, b in pairs):
            log.warning("the head's kernel: not used, torch's operations are: it computes something else here")
            return False
    return True


def _within(
    targets: Int[Tensor, "n m"], starts: Int[Tensor, " K"], width: int
) -> tuple[Int[Tensor, "n m K"], Bool[Tensor, "n m K"]]:
    """Returns (index of each token within each of K tiles of the vocabulary, else 0; whether it is in that tile). For
    all tiles at once, since on a card these operations take longer to start than to compute."""
    offset = targets[..., None] - starts
    inside = (offset >= 0) & (offset < width)
    return offset * inside, inside


def _tiles(length: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def _product(a: Float[Tensor, "I J"], b: Float[Tensor, "J K"], how: _How) -> Float[Tensor, "I K"]:
    """Returns a b in float32: logits rounded to bfloat16 would give a logprob an error of 2e-2 nats."""
    if a.dtype.itemsize < 4 and how.cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return _operand(a, how) @ _operand(b, how)


def _operand(matrix: Tensor, how: _How) -> Tensor:
    """Returns the matrix as _product multiplies it: no CPU kernel has half inputs and a float32 output."""
    return matrix if how.cuda else matrix.to(how.wide)
