"""The arithmetic of LoRA layers that read one input, as one operation with a gradient of its own.

    y_i = x W_i' + b_i + s_i h_i B_i',   h = x A',   A = all A_i, one below the other (Hu et al. 2021, section 4.1)
    dx = sum_i g_i W_i + u A,   u_i = s_i g_i B_i,   dA = u' x,   dB_i = s_i g_i' h_i

PEFT writes `result + B(A(x)) * scaling`, layer by layer, so that a step goes through [N, out] twice more forwards, to
multiply and to add, and the input's gradient is the sum of two tensors per layer. Here products add to what is there
already, one thin product serves all layers, and what is kept is the same: x and h. The sum W + s B A is never formed:
rounded to 16 bits it would not be the policy that the generators serve. Of a layer in 4 bits bitsandbytes makes x W',
and W once more for dx, one layer at a time.

Letters: N tokens, R rows of all A_i together. W_i and b_i are frozen.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Adapted(NamedTuple):
    """A linear layer and the adapter on it, all of one type."""

    weight: Tensor  # [out, in], or as bitsandbytes packs it
    bias: Tensor | None  # [out]
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float
    packing: Any = None  # bitsandbytes' QuantState, of a layer in 4 bits

    def base(self, x: Tensor) -> Tensor:
        """[..., out] of the layer without its adapter. No view of another tensor: models may write to it."""
        if self.packing is None:
            return F.linear(x, self.weight, self.bias)
        from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]  # here: slow to import, and few runs use it

        product: Tensor = matmul_4bit(x, self.weight, quant_state=self.packing, bias=self.bias)
        return product

    def whole(self) -> Tensor:
        """[out, in], in the adapter's type."""
        if self.packing is None:
            return self.weight
        from bitsandbytes.functional import dequantize_4bit

        weight: Tensor = dequantize_4bit(self.weight, self.packing)
        return weight


def adapted_linear(x: Tensor, layers: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """[..., out] of each layer, from x [..., in]; differentiable once, in x and in every a and b."""
    return applied(_Linear, x, layers)


def applied(function: type[torch.autograd.Function], x: Tensor, layers: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """What an autograd function makes of x, the layers' tensors and what else they have; layers_of puts them together
    again."""
    tensors = [tensor for layer in layers for tensor in layer[:4]]
    outputs: tuple[Tensor, ...] = function.apply(x, [layer[4:] for layer in layers], *tensors)  # type: ignore[no-untyped-call]
    return outputs


def layers_of(tensors: Sequence[Tensor], rest: Sequence[tuple[float, Any]]) -> list[Adapted]:
    quarters = (tensors[i::4] for i in range(4))
    return [Adapted(w, bias, a, b, *others) for w, bias, a, b, others in zip(*quarters, rest, strict=True)]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rest: list[tuple[float, Any]], *tensors: Tensor) -> tuple[Tensor, ...]:
        layers = layers_of(tensors, rest)
        rows = x.reshape(-1, x.shape[-1])
        hidden = rows @ _below(layers).t()  # [N, R]
        outputs = []
        for layer, h in zip(layers, _parts(hidden, layers), strict=True):
            outputs.append(layer.base(x))
            outputs[-1].view(len(rows), -1).addmm_(h, layer.b.t(), alpha=layer.scale)
        ctx.save_for_backward(x, hidden, *tensors)
        ctx.rest = rest
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, *tensors = ctx.saved_tensors
        layers = layers_of(tensors, ctx.rest)
        rows, slopes = x.reshape(-1, x.shape[-1]), [g.reshape(-1, g.shape[-1]) for g in grads]
        thin = torch.empty_like(hidden)  # u
        found: list[Tensor | None] = []
        for layer, g, h, u in zip(layers, slopes, _parts(hidden, layers), _parts(thin, layers), strict=True):
            _scaled_product(g, layer.b, layer.scale, u)
            found += [None, None, None, _scaled_product(g.t(), h, layer.scale, torch.empty_like(layer.b))]
        found[2::4] = torch.split(thin.t() @ rows, [len(layer.a) for layer in layers])
        to_input = None
        if ctx.needs_input_grad[0]:
            to_input = slopes[0] @ layers[0].whole()
            for layer, g in zip(layers[1:], slopes[1:], strict=True):
                to_input.addmm_(g, layer.whole())
            to_input = to_input.addmm_(thin, _below(layers)).view_as(x)
        return to_input, None, *found


def _below(layers: list[Adapted]) -> Tensor:
    """[R, in]"""
    return layers[0].a if len(layers) == 1 else torch.cat([layer.a for layer in layers])


def _parts(wide: Tensor, layers: list[Adapted]) -> tuple[Tensor, ...]:
    """[N, R] -> the columns of each layer."""
    return torch.split(wide, [len(layer.a) for layer in layers], 1)


def _scaled_product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    return torch.addmm(out, a, b, beta=0, alpha=scale, out=out)
