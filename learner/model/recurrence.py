"""Layers that carry a state along, over a packed row: a completion goes on from the state in which its prompt left the
layer.

There are two kinds of such layers. A short causal convolution of width W sees a token and the W - 1 tokens before it. A
layer with the gated delta rule (2412.06464, equation 10; in chunks as in section 3.3) has such a convolution, too, and
a matrix S for each head, which every token changes:

    S_t = exp(g_t) S_(t-1) + beta_t k_t (v_t - exp(g_t) S_(t-1)^T k_t)^T,   output S_t^T q_t

Both are exact for a packed row (learner.model.attention) in which the prompt is computed once: the convolution finds
the last W - 1 tokens of the prompt before each completion, and the recurrence of each completion begins with the matrix
at the end of the prompt, whose gradient sums over the completions. Padding has g = beta = 0, which changes no matrix.

In transformers these layers call two functions by their global names. The model gets a copy of the layer's forward pass
with other globals (learner.model.fusion), and other models of the process keep theirs. What is computed within a
segment is left to the function of that name: transformers takes the kernels of flash-linear-attention and causal_conv1d
where they are installed, and functions of torch elsewhere. learner.model.packing_check proves at start-up that a model
computes correctly with these layers. Mamba's layers call other functions, so their models are padded.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from inspect import unwrap
from itertools import chain
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner.batch.layout import Layout, Size
from learner.model.fusion import with_globals

CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
# The types of layers in transformers' configs, by the functions that the layer's forward pass calls.
KINDS = {(CONVOLUTION,): "conv", (CONVOLUTION, DELTA_RULE): "linear_attention"}
# The functions with which a segment is computed: those of the packages that are installed, or those of torch.
INSTALLED, TORCH = "functions of flash-linear-attention or causal_conv1d", "functions of torch"
PACKAGES = ("fla", "causal_conv1d")
CHUNK = 64  # tokens that transformers' function, and flash-linear-attention's kernel, compute at once


def recurrent_layers(lm: nn.Module) -> dict[str, list[nn.Module]]:
    """Returns the modules of the model that `carry_states` knows, by the type of their layer in transformers' configs;
    types of which the model has none are left out."""
    found: dict[str, list[nn.Module]] = {}
    for part in lm.modules():
        if (kind := KINDS.get(_called(type(part)))) is not None:
            found.setdefault(kind, []).append(part)
    return found


def functions(layers: Sequence[nn.Module]) -> list[str]:
    """Returns the names of the functions with which these layers can compute a segment, the fastest first."""
    others = bool(layers) and any(find_spec(package) is not None for package in PACKAGES)
    return [INSTALLED, TORCH] if others else [TORCH]


def carry_states(layers: Sequence[nn.Module], by: str = TORCH) -> None:
    """Lets these modules of `recurrent_layers` compute packed rows; other rows are computed by the same functions.

    The modules find the layout of a packed row in the model's keyword arguments: under the name packed_layout, or under
    seq_idx (transformers' name for the sequence of each token), which alone reaches Lfm2's convolutions.

    by: one of `functions`.
    """
    forwards = {kind: _with_layout(kind, by) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        # The method is replaced on the instance, so that no name of a module or weight changes.
        layer.forward = MethodType(forwards[type(layer)], layer)


def carry_as(lm: nn.Module, tried: nn.Module) -> None:
    """Lets the layers of `lm` compute packed rows as those of `tried` do, a model of the same classes; also if those do
    not."""
    layers, others = (chain.from_iterable(recurrent_layers(model).values()) for model in (lm, tried))
    for layer, other in zip(layers, others, strict=True):
        if (forward := vars(other).get("forward")) is not None:
            layer.forward = MethodType(forward.__func__, layer)


def forget_layouts(layers: Sequence[nn.Module]) -> None:
    """Undoes `carry_states`."""
    for layer in layers:
        del layer.forward


def _called(kind: type[nn.Module]) -> tuple[str, ...]:
    """Returns those of the two names that the forward pass of a class refers to."""
    names = getattr(getattr(unwrap(kind.forward), "__code__", None), "co_names", ())
    return tuple(name for name in (CONVOLUTION, DELTA_RULE) if name in names)


def _with_layout(kind: type[nn.Module], by: str) -> Callable[..., Any]:
    # What is unwrapped moves weights that accelerate has put elsewhere, and the learner lets it move none.
    forward: Any = unwrap(kind.forward)
    plain = {name: forward.__globals__[name] for name in _called(kind)}
    if by == TORCH:  # transformers' choice of a package's function wraps torch's
        plain = {name: unwrap(function) for name, function in plain.items()}
    ours: dict[str, Callable[..., Any]] = {CONVOLUTION: _convolution, DELTA_RULE: _delta_rule}
    return with_globals(forward, {name: partial(ours[name], function) for name, function in plain.items()})


def _convolution(
    plain: Callable[..., Tensor],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    packed_layout: Layout | None = None,
    seq_idx: Layout | None = None,
    **others: Any,
) -> Tensor:
    """Computes a causal convolution of [B, C, L] by `plain`, with the weight [C, W] and bias [C]; B = 1 and L = N for a
    packed row. The names of the arguments are those by which transformers' layers pass them."""
    layout = packed_layout or seq_idx
    if layout is None:
        return plain(hidden_states, weight, bias, activation=activation, **others)
    preceded = layout.preceded(weight.shape[-1] - 1, hidden_states.device)
    row = preceded.tokens.of(F.pad(hidden_states[0].T, (0, 0, 0, 1))).T[None]
    return plain(row, weight, bias, activation=activation, **others).index_select(2, preceded.own)


def _delta_rule(
    plain: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    packed_layout: Layout | None = None,
    seq_idx: Layout | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Computes the gated delta rule by `plain`: (outputs [B, L, H, E], last matrices [B, H, D, E] or None) of query and
    key [B, L, H, D], value [B, L, H, E], g and beta [B, L, H]. Of a packed row, B = 1 and L = N, there are no last
    matrices. The names of the arguments are those by which transformers' layers pass them."""
    if packed_layout is None:
        return plain(query, key, value, g=g, beta=beta, **others)
    own = {"initial_state": None, "output_final_state": False, "cu_seqlens": None}
    if any(others.get(name, value) is not value for name, value in own.items()):
        raise NotImplementedError("a packed row begins with no state, and leaves none")
    rule = partial(plain, **{name: value for name, value in others.items() if name not in own})
    pieces = packed_layout.pieces(CHUNK, query.device)
    sizes = [*pieces.whole, *pieces.following]
    parts = zip(*(_split(x, pieces.order, sizes) for x in (query, key, value, g, beta)), strict=True)
    outputs, states = _through(rule, parts, len(pieces.whole), None)
    if pieces.owners is not None:
        outputs += _through(rule, parts, len(pieces.following), pieces.owners.of(states))[0]
    return torch.cat(outputs).index_select(0, pieces.places)[None], None


def _split(x: Tensor, order: Tensor, sizes: Sequence[Size]) -> list[Tensor]:
    """Returns the batches [rows, tokens, ...] of a packed row [1, N, ...], with zeros for padding."""
    padded = F.pad(x[0], (0, 0) * (x.ndim - 2) + (0, 1)).index_select(0, order)
    parts = torch.split(padded, [rows * tokens for rows, tokens in sizes])
    return [part.view(*size, *part.shape[1:]) for part, size in zip(parts, sizes, strict=True)]


def _through(
    rule: Callable[..., tuple[Tensor, Tensor]], parts: Iterator[tuple[Tensor, ...]], count: int, state: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """Computes the next `count` batches, in which ever fewer segments go on, the first of those before.

    Args:
        state: [S, H, D, E] matrices with which the segments begin; None: zeros.

    Returns:
        (for each batch the outputs [rows tokens, H, E], the matrices [S, H, D, E] with which the segments end).
    """
    outputs, ended = [], []
    for _ in range(count):
        query, key, value, g, beta = next(parts)
        if state is not None:
            ended.append(state[len(query) :])
            state = state[: len(query)]
        output, state = rule(query, key, value, g=g, beta=beta, initial_state=state, output_final_state=True)
        outputs.append(output.flatten(0, 1))
    assert state is not None, "there is at least one batch"
    return outputs, torch.cat([state, *reversed(ended)])
