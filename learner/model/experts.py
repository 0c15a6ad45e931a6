"""LoRA on mixtures of experts (learner.lora.targets: experts), without the dense change of any expert's weight; and
routing replay, below it.

transformers holds the experts of a layer as two tensors of all their matrices: gate_up_proj and down_proj, E experts
[E, out, in] each, or [E, in, out] in gpt-oss. PEFT adapts such a tensor as a parameter (target_parameters) and computes
the change of every expert's matrix in each forward pass, E * out * in numbers: 600 million for a layer of
Qwen3-30B-A3B. Here the tokens of an expert go through its A and B instead, as with any other layer:

    y_t = x_t W_e' + b_e + s h_t B_e',   h_t = x_t A_e'   for the tokens t that the router sends to expert e
    dx = g W_e + u A_e,   u = s g B_e,   dA_e = u' x,   dB_e = s g' h   (g, h, u, x: the rows of expert e)

Modules, names and files stay PEFT's: two nested ParamWrapper around the module of the experts, of which the inner one
has the adapter of gate_up_proj and the outer one that of down_proj; A [E r, in], rows by expert, then rank; B
[out, r E], columns by rank, then expert. So the exported adapter is one that PEFT loads. The router is never adapted.

Letters: E experts, r rank, R rank rounded up to what a grouped product takes, N tokens, k experts of a token, S = N k
pairs of a token and one of its experts.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from cluster.errors import WrongInput
from rollout.weights import Source

GATE_UP, DOWN = "gate_up_proj", "down_proj"
BIAS = "_bias"
TWO = 2  # columns of a tensor whose numbers are their places: transformers drops a dimension of 1
MULTIPLE = 8  # a grouped product takes rows of whole 16 bytes, which are 8 numbers of 16 bits


def expert_parameters(lm: Any) -> list[str]:
    """Returns the names of the experts' tensors for PEFT's target_parameters. The model may be without weights.

    Raises ValueError if the model's experts are not held and computed as this module takes for granted.
    """
    found = [(name, module) for name, module in lm.named_modules() if name.rpartition(".")[2] == "experts"]
    for name, module in found:
        if not _is_fused(module):
            raise ValueError(
                f"learner.lora.targets: experts are adapted where transformers holds them as {GATE_UP} and {DOWN}, and "
                f"{name} of this model (model_type {lm.config.model_type}) is a {type(module).__name__} without these; "
                "leave experts out"
            )
    if not found:
        raise ValueError(
            f"learner.lora.targets: experts needs a model with routed experts, and this one (model_type "
            f"{lm.config.model_type}) has none; leave it out"
        )
    return [f"experts.{GATE_UP}", f"experts.{DOWN}"]


def _is_fused(module: nn.Module) -> bool:
    """Whether the module computes down(gate(gate_up(x))) of a token's experts, from tensors of all experts' matrices.
    transformers' use_experts_implementation, which marks such classes, leaves these attributes."""
    weights = [getattr(module, name, None) for name in (GATE_UP, DOWN)]
    known = all(hasattr(module, name) for name in ("_apply_gate", "is_transposed", "has_bias"))
    return known and all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)


def group(lm: Any) -> None:
    """Makes adapted experts of the model compute as this module's head says, if there are any."""
    for outer, inner in _pairs(lm).values():
        # The method is replaced on the instance, so that no name of a module or weight changes.
        outer.forward = partial(_forward, outer, inner)


def _pairs(lm: Any) -> dict[str, tuple[Any, Any]]:
    """Returns (the wrapper of down_proj, the wrapper of gate_up_proj) of all adapted experts, by the experts' name."""
    return {
        name: (module, module.base_layer)
        for name, module in lm.named_modules()
        if isinstance(module, ParamWrapper) and isinstance(module.base_layer, ParamWrapper)
    }


def _forward(outer: Any, inner: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Returns [N, H] of the experts for x [N, H].

    index, weights: [N, k], the experts of each token and their shares in its output, by the router.
    """
    experts = outer.get_base_layer()
    (name,) = set(outer.active_adapters)  # two adapters at a time are not computed here
    if outer.disable_adapters or name not in outer.lora_A:
        output: Tensor = experts(x, index, weights)
        return output
    ids, order = index.flatten().sort(stable=True)  # [S]
    every = torch.arange(experts.num_experts, device=ids.device)
    routed = _Routed(ids, torch.searchsorted(ids, every, right=True).to(torch.int32), experts.is_transposed)
    rows = x.index_select(0, order // index.shape[1])
    rows = experts._apply_gate(_product(rows, inner, name, routed))
    rows = _product(rows, outer, name, routed) * weights.flatten().index_select(0, order)[:, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return rows.index_select(0, back).view(*index.shape, -1).sum(1).to(x.dtype)


class _Routed(NamedTuple):
    """The pairs of a token and an expert, by expert.

    ids: [S] expert of each pair, ascending. ends: [E] int32, index behind the last pair of each expert. transposed:
    whether the experts' matrices are [in, out].
    """

    ids: Tensor
    ends: Tensor
    transposed: bool


def _product(x: Tensor, wrapper: Any, name: str, routed: _Routed) -> Tensor:
    """Returns [S, out] of the adapted tensor of a wrapper for rows [S, in]."""
    experts, weight = wrapper.get_base_layer(), wrapper.get_param()
    bias = getattr(experts, wrapper.parameter_name + BIAS) if experts.has_bias else None
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    return grouped_linear(x, weight, bias, a, b, wrapper.scaling[name], routed)


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, routed: _Routed
) -> Tensor:
    """Returns [S, out] for rows x [S, in]; differentiable once, in x, a and b.

    weight: [E, out, in], or [E, in, out] if transposed; frozen, as is bias [E, out]. a, b: [E r, in] and [out, r E].
    """
    found: Tensor = _Grouped.apply(x, weight, bias, a, b, scale, routed)  # type: ignore[no-untyped-call]
    return found


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, routed: _Routed
    ) -> Tensor:
        ends, (wide_a, wide_b) = routed.ends, _by_expert(a, b, len(weight))
        y = F.grouped_mm(x, weight if routed.transposed else weight.mT, offs=ends)
        if bias is not None:
            y += bias.index_select(0, routed.ids)
        hidden = F.grouped_mm(x, wide_a.mT, offs=ends)  # [S, R]
        y.add_(F.grouped_mm(hidden, wide_b, offs=ends), alpha=scale)
        ctx.save_for_backward(x, hidden, weight, a, b, ends)
        ctx.scale, ctx.transposed = scale, routed.transposed
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, hidden, weight, a, b, ends = ctx.saved_tensors
        grad, rank = grad.contiguous(), len(a) // len(weight)
        wide_a, wide_b = _by_expert(a, b, len(weight))
        thin = F.grouped_mm(grad, wide_b.mT, offs=ends).mul_(ctx.scale)  # u [S, R]
        to_a = F.grouped_mm(thin.t(), x, offs=ends)  # [E, R, in]
        to_b = F.grouped_mm(hidden.t(), grad, offs=ends).mul_(ctx.scale)  # [E, R, out]
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = F.grouped_mm(grad, weight.mT if ctx.transposed else weight, offs=ends)
            to_x += F.grouped_mm(thin, wide_a, offs=ends)
        own_a, own_b = to_a[:, :rank].reshape(a.shape), to_b[:, :rank].permute(2, 1, 0).reshape(b.shape)
        return to_x, None, None, own_a, own_b, None, None


def _by_expert(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Returns A_e [E, R, in] and B_e' [E, R, out] of PEFT's matrices [E r, in] and [out, r E]. Rows beyond the rank are
    zero."""
    rank = len(a) // experts
    missing = -rank % MULTIPLE
    halves = a.view(experts, rank, -1), b.view(len(b), rank, experts).permute(2, 1, 0)
    wide_a, wide_b = (F.pad(half, (0, 0, 0, missing)) if missing else half.contiguous() for half in halves)
    return wide_a, wide_b


# Merged weights of adapted experts, for learner.model.policy.merged. Each is computed for itself, so that no more than
# the change of one matrix of one expert is in memory.


def merged_experts(lm: Any, adapter: str) -> Iterator[tuple[str, Source]]:
    """Yields (name in the checkpoint, source of the merged weight) for all tensors of experts with this adapter, biases
    included. vLLM holds them in one module, which it loads as a whole."""
    for name, wrappers in _pairs(lm).items():
        if adapter not in wrappers[0].lora_A:
            continue
        experts = wrappers[0].get_base_layer()
        by_name = {f"{name}.{wrapper.parameter_name}": wrapper for wrapper in wrappers}
        for key, part in _in_checkpoint(lm, by_name).items():
            yield from _one_by_one(key, part, adapter)
        for kind, bias in experts.named_parameters(recurse=False):
            if kind.endswith(BIAS):
                yield from ((f"{name}.{i}.{kind}", Source.of(one)) for i, one in enumerate(bias))


def _one_by_one(key: str, part: "_Part", adapter: str) -> Iterator[tuple[str, Source]]:
    """Yields the tensor, or under numbered names its experts, where transformers has the checkpoint's own name for all
    of them: those of gpt-oss vLLM loads a second time one by one only (0.32: _load_weights_other of its gpt_oss.py
    copies whole ones into tensors without content)."""
    block, _, leaf = key.rpartition(".")
    if part.rows.dim() == 1 or leaf not in (GATE_UP, DOWN):
        yield key, Source(part.shape, partial(part.write, adapter))
        return
    for i, rows in enumerate(part.rows):
        one = part._replace(rows=rows)
        yield f"{block}.{i}.{leaf}", Source(one.shape, partial(one.write, adapter))


class _Part(NamedTuple):
    """A tensor of a checkpoint: rows of an adapted tensor of experts.

    wrapper: the adapter's. rows: [out] or [E, out] int64, which rows of all experts' [E out, in] these are. transposed:
    whether the checkpoint has them as columns. width: numbers of a row.
    """

    wrapper: Any
    rows: Tensor
    transposed: bool
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        *experts, out = self.rows.shape
        return (*experts, self.width, out) if self.transposed else (*experts, out, self.width)

    @torch.no_grad()
    def write(self, adapter: str, place: Tensor) -> None:
        """Writes the merged weight to `place`, computed in float32 and then rounded to its dtype."""
        wrapper, whole = self.wrapper, place if place.dim() == 3 else place[None]
        weight = wrapper.get_param()
        weight = weight.mT if wrapper.get_base_layer().is_transposed else weight  # [E, out, in]
        experts, out, _ = weight.shape
        a, b = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
        a, b = a.view(experts, -1, self.width), b.view(out, -1, experts)
        for i, places in enumerate(self.rows.view(len(whole), -1)):
            expert, here = int(places[0]) // out, (places % out).to(weight.device)
            change = b[here, :, expert].float() @ a[expert].float()
            wide = weight[expert, here].float().add_(change, alpha=wrapper.scaling[adapter])
            whole[i].copy_(wide.t() if self.transposed else wide)


def _in_checkpoint(lm: Any, wrappers: Mapping[str, Any]) -> dict[str, _Part]:
    """Returns what the checkpoint has of adapted tensors of experts: the name of each tensor there -> its part.

    transformers is asked by the operations with which it saves a model, on tensors whose numbers are their places.
    """
    found: dict[str, _Part] = {}
    for name, wrapper in wrappers.items():
        transposed = wrapper.get_base_layer().is_transposed
        shape = wrapper.get_param().shape
        experts, out, width = shape if not transposed else (shape[0], shape[2], shape[1])
        places = torch.arange(experts * out).view(experts, out, 1).expand(-1, -1, TWO)
        for key, saved in revert_weight_conversion(lm, {name: places.mT if transposed else places}).items():
            as_columns = saved.shape[-1] != TWO
            found[key] = _Part(wrapper, saved[..., 0, :] if as_columns else saved[..., 0], as_columns, width)
    return found


# Routing replay: the learner sends each token to the experts to which the sampler's routers sent it (Rollout Routing
# Replay, Ma et al. 2025, 2510.11370).
#
# Where two experts score alike, rounding sends a token to one in the sampler and to the other in the learner, and the
# logprobs of that token and of those behind it differ by far more than rounding. Only the choice is the sampler's: how
# much each chosen expert counts is computed here, from the router's own scores, so that gradients are the policy's.
#
# Every router of transformers chooses by one topk among its scores. While a router computes, that topk is given the
# experts, and so nothing else of a family has to be known.

NAMES = ("gate", "router")  # of a router, beside `experts`
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Routers:
    """The routers of a model's layers with experts. They choose by themselves until `replay` says otherwise.

    Attributes:
        width: numbers that `replay` takes for each token: layers * k.

    Raises WrongInput if the model has none, or one that does not say how many experts it chooses.
    """

    def __init__(self, lm: Any, path: str) -> None:
        self._experts: Tensor | None = None  # [N, layers, k]
        self._k, self._path = 0, path
        modules = dict(lm.named_modules())
        for name, module in modules.items():
            block, _, leaf = name.rpartition(".")
            found = LAYER.search(name)
            if leaf in NAMES and f"{block}.experts" in modules and found is not None:
                self._k = int(getattr(module, "top_k", 0))
                if self._k == 0:
                    raise WrongInput(_unknown(self._path, f"{name} does not say how many experts it chooses"))
                # The method is replaced on the instance, so that no name of a module or weight changes.
                module.forward = partial(self._forward, module.forward, int(found[1]), name)
        if self._k == 0:
            raise WrongInput(_unknown(path, "it has no layers with routed experts"))
        self.width = int(lm.config.get_text_config().num_hidden_layers) * self._k

    def replay(self, experts: Tensor | None) -> None:
        """experts: [N, layers * k], what the forward passes from now on choose, and their backward passes where layers
        are computed again; -1: the router's own choice. None: all of it is the routers' own."""
        if experts is not None and experts.shape[1] != self.width:
            raise WrongInput(
                _unknown(self._path, f"a token has {self.width} of them, where rollouts have {experts.shape[1]}")
            )
        self._experts = None if experts is None else experts.view(len(experts), -1, self._k)

    def _forward(self, choose: Any, layer: int, name: str, *args: Any, **others: Any) -> Any:
        if self._experts is None:
            return choose(*args, **others)
        with _Given(self._experts[:, layer].long()) as given:
            found = choose(*args, **others)
        if given.asked != 1:
            raise WrongInput(_unknown(self._path, f"{name} chooses by {given.asked} topk, where one is known"))
        return found


class _Given(TorchFunctionMode):
    """While it is entered, topk chooses the given indices [N, k], and its own where these are negative.

    Attributes:
        asked: number of topk that chose k.
    """

    def __init__(self, experts: Tensor) -> None:
        super().__init__()
        self._experts, self.asked = experts, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or found.indices.shape != self._experts.shape:
            return found
        self.asked += 1
        index = self._experts.where(self._experts >= 0, found.indices)
        return type(found)((args[0].gather(-1, index), index))  # values and indices


def _unknown(path: str, why: str) -> str:
    return (
        f"rollout.routing_replay: the learner must know the routers of {path}, and {why}; leave routing_replay out "
        "(docs/models.md)"
    )
