"""Hidden states -> logprobs of given tokens and entropy, without ever holding a [tokens, vocab] tensor.

Letters: N tokens, V vocabulary, H hidden size. r = h W^T, z = f(r) / T are the logits at temperature T, with the f that
the model applies to its output embedding's products (mostly f(r) = r), p = softmax(z).

Under LoRA the head W is frozen and the loss reaches h only through one number per token, so that
    d logp[n] / d h[n] = (f'(r[n, y]) W[y] - sum_v p[n, v] f'(r[n, v]) W[v]) / T =: e[n]
can be formed in the forward pass, while p[n] is at hand, and is all that is kept: the backward pass is g[n] e[n].
Two matrix products in all instead of the three of recomputing the logits. The tiles over the vocabulary are folded
together by the online softmax of FlashAttention (2205.14135) with K = V = W; the running sums are float32, since
sums rounded to bfloat16 per tile bias the gradient. Where f' is constant, entropy comes for free:
H[n] = logsumexp(z[n]) - f' h[n]·(p[n] W) / T.

Where the head is trained, its gradient sums over tokens what must not be kept per token, so the backward pass forms the
logits once more: d logp[n] / d r[n] = (onehot(y[n]) - p[n]) f'(r[n]) / T, four matrix products in all.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# What some models do to the products of output embedding and hidden state before they are logits.
#
#     z = cap tanh(scale r / cap), or z = scale r without a cap
# Granite and Cohere scale; Gemma 2 caps (2408.00118, section 2: "logit soft-capping").

# Names in transformers' configs, and the exponent of the scale that each stands for.
SCALES = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}
MULTIPLIES = ("hyperclovax",)  # by what others call logits_scaling and divide by
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


class Logits(NamedTuple):
    """z as a function of r = head @ hidden, both in float32."""

    scale: float = 1.0
    cap: float | None = None

    def of_(self, products: Tensor, temperature: float) -> Tensor:
        """z / temperature, in the place of the products."""
        if self.cap is None:  # usually both are 1, and a pass over the logits is saved
            return products if temperature == self.scale else products.div_(temperature / self.scale)
        return products.mul_(self.scale / self.cap).tanh_().mul_(self.cap / temperature)

    def bend_(self, logits: Tensor, temperature: float) -> Tensor:
        """dz / dr / scale = 1 - (z / cap)^2 of z / temperature, in its place; only with a cap."""
        assert self.cap is not None
        return logits.mul_(temperature / self.cap).square_().neg_().add_(1.0)


PLAIN = Logits()


def logits_of(config: Any) -> Logits:
    """By a transformers config of text. What its names do not tell, learner.model finds out by trying."""
    scale, caps = 1.0, [cap for name in CAPS if (cap := getattr(config, name, None))]
    for name, exponent in SCALES.items():
        power = 1 if config.model_type in MULTIPLIES else exponent
        scale *= float(getattr(config, name, None) or 1.0) ** power
    return Logits(scale, float(caps[0]) if caps else None)


# The output embedding in its operations, whole on one rank or in shards over several.

P = ParamSpec("P")
T = TypeVar("T")

GATHERED = "gathered"  # name of the method that a head in shards gets


def with_head(
    lm: Any, operation: Callable[Concatenate[Tensor, Tensor, P], T], hidden: Tensor, *args: P.args, **kwargs: P.kwargs
) -> T:
    """operation(hidden, head, ...), head [V, H]. Of a base in shards (learner.model.sharded_base) it is gathered for
    the operation, and if it is trained once more for the backward pass; all ranks must be in both."""
    module = lm.get_output_embeddings()
    gathered = getattr(module, GATHERED, None)
    if gathered is None:
        return operation(hidden, module.weight, *args, **kwargs)
    answer: T = gathered(operation, hidden, *args, **kwargs)
    return answer


def gather_in_operations(head: nn.Module) -> None:
    """For a head that FSDP2 has divided: its hooks are at the module's methods, not at uses of its weight."""
    from torch.distributed.fsdp import register_fsdp_forward_method  # here: slow to import, and few runs use it

    def gathered(module: Any, operation: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return operation(hidden, module.weight, *args, **kwargs)

    setattr(head, GATHERED, MethodType(gathered, head))
    register_fsdp_forward_method(head, GATHERED)


def begin_anew(lm: Any) -> None:
    """After a pass that failed half-way: of a base in shards, what is gathered is let go, and FSDP2 forgets the pass.
    Else its outermost modules would sum no gradients any more."""
    for module in (lm.base_model, lm.get_output_embeddings()):
        if hasattr(module, "reset_iter_state"):
            module.reset_iter_state()


def check_ids(head: Tensor, highest: int) -> None:
    """Raises ValueError if a token id is beyond the vocabulary of that head, [V, H]."""
    if highest >= len(head):
        raise ValueError(
            f"token ids: must be below the vocabulary of model.path, {len(head)}, got {highest}; the rollouts were "
            "made with another tokenizer or model"
        )


# Tokens and words of a tile, whose float32 logits are 16 MiB on a CPU and 64 MiB on a card. Each tile of tokens reads
# the whole head twice: with 512 tokens that would take an H100 half as long again as their products.
TOKEN_TILE, CARD_TOKEN_TILE, VOCAB_TILE = 512, 2048, 8192


class _How(NamedTuple):
    logits: Logits
    temperature: float
    token_tile: int
    vocab_tile: int
    cuda: bool

    @classmethod
    def on(cls, cuda: bool, logits: Logits, temperature: float, token_tile: int | None, vocab_tile: int) -> "_How":
        """Of a device; asked for outside of autograd.Function."""
        return cls(logits, temperature, token_tile or (CARD_TOKEN_TILE if cuda else TOKEN_TILE), vocab_tile, cuda)


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
    """Logprobs, differentiable once in `hidden`, and in `head` if that wants a gradient; entropies without gradient.

    Args:
        hidden: states that predict the targets; float32, bfloat16 or float16.
        head: output embedding of the same dtype; with tied embeddings the embedding matrix itself.
        targets: int64 token ids.
        temperature: the sampler's.
        logits: what the model does to head @ hidden.
        token_tile: None: by the device.

    Returns:
        float32, nats.
    """
    kind = _TrainedHead if head.requires_grad else _FrozenHead
    how = _How.on(hidden.is_cuda, logits, temperature, token_tile, vocab_tile)
    logprobs, entropy = kind.apply(hidden, head, targets, how)  # type: ignore[no-untyped-call]
    return logprobs, entropy


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
    """float32 logprobs without a gradient, with one matrix product; shapes as in policy_logprobs."""
    how = _How.on(hidden.is_cuda, logits, temperature, token_tile, vocab_tile)
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
    """float32 entropies (nats) of the distributions that the targets were drawn from, at the cost of token_logprobs."""
    how = _How.on(hidden.is_cuda, logits, temperature, token_tile, vocab_tile)
    return _folded(hidden, head, targets, how, "entropy")


def _folded(hidden: Tensor, head: Tensor, targets: Tensor, how: _How, want: str) -> Float[Tensor, " N"]:
    """That field of _Fold, of all tokens."""
    out = torch.empty(len(targets), device=hidden.device)
    for rows in _tiles(len(targets), how.token_tile):
        out[rows] = getattr(_fold(hidden[rows], head, targets[rows], how, want), want)
    return out


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, how: _How) -> tuple[Tensor, Tensor]:
        logprobs, entropy = (torch.empty(len(targets), device=hidden.device) for _ in range(2))
        jacobian = torch.empty_like(hidden)
        slope = how.logits.scale / how.temperature
        for rows in _tiles(len(targets), how.token_tile):
            h = hidden[rows]
            fold = _fold(h, head, targets[rows], how, "mean_row")
            logprobs[rows] = fold.logprob
            own = head[targets[rows]].float()
            if how.logits.cap is None:
                entropy[rows] = fold.top + fold.log_total - (h.float() * fold.mean_row).sum(-1) * slope
            else:
                entropy[rows] = fold.entropy
                own *= how.logits.bend_(fold.logprob + fold.top + fold.log_total, how.temperature)[:, None]
            jacobian[rows] = own.sub_(fold.mean_row).mul_(slope).to(hidden.dtype)
        ctx.save_for_backward(jacobian)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        (jacobian,) = ctx.saved_tensors
        # In its place: nothing else wants it, and autograd says so if a second backward pass does.
        return jacobian.mul_(grad[:, None]), None, None, None


class _TrainedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, how: _How) -> tuple[Tensor, Tensor]:
        logprobs, entropy, top, log_total = (torch.empty(len(targets), device=hidden.device) for _ in range(4))
        for rows in _tiles(len(targets), how.token_tile):
            fold = _fold(hidden[rows], head, targets[rows], how, "entropy")
            logprobs[rows], entropy[rows], top[rows], log_total[rows] = fold[:4]
        ctx.save_for_backward(hidden, head, targets, top, log_total)
        ctx.how = how
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, head, targets, top, log_total = ctx.saved_tensors
        how: _How = ctx.how
        slope = (grad * (how.logits.scale / how.temperature))[:, None]
        # Vocabulary outside: float32 sums of [N, H] and of one tile of the head, instead of a whole [V, H].
        grad_hidden, grad_head = torch.zeros_like(hidden, dtype=torch.float32), torch.empty_like(head)
        for words in _tiles(len(head), how.vocab_tile):
            weight, total = head[words], torch.zeros_like(head[words], dtype=torch.float32)
            for rows in _tiles(len(targets), how.token_tile):
                logits = how.logits.of_(_product(hidden[rows], weight.t(), how), how.temperature)
                bend = None if how.logits.cap is None else how.logits.bend_(logits.clone(), how.temperature)
                logits.sub_(top[rows, None]).sub_(log_total[rows, None]).exp_().mul_(-slope[rows])
                place, inside = _within(targets[rows], words)
                logits.scatter_add_(1, place, torch.where(inside, slope[rows], 0.0))
                rounded = (logits if bend is None else logits.mul_(bend)).to(head.dtype)
                grad_hidden[rows] += _product(rounded, weight, how)
                total += _product(rounded.t(), hidden[rows], how)
                del logits, bend, rounded  # before the next tile is made
            grad_head[words] = total.to(head.dtype)
        return grad_hidden.to(hidden.dtype), grad_head, None, None


class _Fold(NamedTuple):
    """Of one tile of tokens, float32."""

    logprob: Float[Tensor, " n"]  # of the targets
    entropy: Float[Tensor, " n"]
    top: Float[Tensor, " n"]  # greatest logit
    log_total: Float[Tensor, " n"]  # logsumexp of the logits less `top`: apart, or great logits would round it away
    mean_row: Float[Tensor, "n H"]  # p W; with a cap (p bend) W; H = 0 where it is not wanted


def _fold(
    hidden: Float[Tensor, "n H"], head: Float[Tensor, "V H"], targets: Int[Tensor, " n"], how: _How, want: str
) -> _Fold:
    """What the forward pass needs of the logits, folded over the tiles of the vocabulary.

    `want`: logprob, entropy or mean_row, which comes with the entropy only if there is a cap; what is not wanted is not
    to be read.
    """
    n = len(hidden)
    top = torch.full((n,), torch.finfo(torch.float32).min, device=hidden.device)
    total, spread, label = (torch.zeros(n, device=hidden.device) for _ in range(3))
    mean = torch.zeros(n, hidden.shape[1] if want == "mean_row" else 0, device=hidden.device)
    bent = want == "mean_row" and how.logits.cap is not None
    for words in _tiles(len(head), how.vocab_tile):
        logits = how.logits.of_(_product(hidden, head[words].t(), how), how.temperature)
        place, inside = _within(targets, words)
        label += torch.where(inside, logits.gather(1, place), 0.0)[:, 0]  # of the same product, so errors cancel
        higher = torch.maximum(top, logits.amax(-1))
        lift = top - higher
        decay = lift.exp()
        logits.sub_(higher[:, None])
        weights = logits.exp() if want == "entropy" or bent else logits.exp_()
        if want == "entropy" or bent:  # total is the sum of exp(z - top), spread that of exp(z - top) (z - top)
            spread.addcmul_(lift, total).mul_(decay).add_(torch.linalg.vecdot(logits, weights))
        total.mul_(decay).add_(weights.sum(-1))
        if bent:
            weights.mul_(how.logits.bend_(logits.add_(higher[:, None]), how.temperature))
        if want == "mean_row":
            mean.mul_(decay[:, None]).add_(_product(weights.to(head.dtype), head[words], how))
        top = higher
        del logits, weights  # before the next tile is made
    log_total = total.log()
    return _Fold(label - top - log_total, log_total - spread / total, top, log_total, mean.div_(total[:, None]))


def _within(targets: Int[Tensor, " n"], words: slice) -> tuple[Int[Tensor, "n 1"], Bool[Tensor, "n 1"]]:
    """(place of each target in that tile of the vocabulary, whether it is there; else the place is 0)."""
    place = targets[:, None] - words.start
    inside = (place >= 0) & (place < words.stop - words.start)
    return place * inside, inside


def _tiles(length: int, tile: int) -> list[slice]:
    return [slice(start, min(start + tile, length)) for start in range(0, length, tile)]


def _product(a: Float[Tensor, "I J"], b: Float[Tensor, "J K"], how: _How) -> Float[Tensor, "I K"]:
    """a b in float32: logits rounded to bfloat16 would put an error of 2e-2 nats on a logprob."""
    if a.dtype == torch.float32:
        return a @ b
    if how.cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # no CPU kernel has half inputs and a float32 output
