"""LoRA adapters on one base model: attaching the policy's adapter and a frozen reference, switching between them, and
operations that compute LoRA layers faster than PEFT does.
"""

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import peft
import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear, LoraLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cluster.errors import WrongInput
from cluster.memory.shape import EXPERTS
from learner.config import ModelConfig
from learner.config.settings import LoraConfig
from learner.model.adapter_config import check_same, read_adapter, targets_of
from learner.model.base import check_finite
from learner.model.bases.quantised import QuantisedLinear
from learner.model.experts import expert_parameters
from learner.model.logprob import decoder_of
from learner.model.masters import difference
from rollout.architecture import ATTENTION, has_experts
from rollout.data.model_files import WEIGHTS_FILE
from rollout.text_part import NAMES, text_adapter
from rollout.weights import linear_layers

# Several LoRA layers that read one input, computed as one autograd function.
#
#     y_i = x W_i' + b_i + s_i h_i B_i',   h = x A',   A = all A_i, one below the other (Hu et al. 2021, section 4.1)
#     dx = sum_i g_i W_i + u A,   u_i = s_i g_i B_i,   dA = u' x,   dB_i = s_i g_i' h_i
#
# PEFT computes `result + B(A(x)) * scaling` layer by layer: the forward pass goes through [N, out] twice more, to
# multiply and to add, and the input's gradient is a sum of two tensors per layer. Here products are accumulated in
# place, and one product x A' serves all layers. The tensors kept are the same: x and h. The sum W + s B A is never
# computed, since rounded to 16 bits it would not be the policy that the generators serve. For a layer in 4 bits
# bitsandbytes computes x W', and dequantizes W again for dx, one layer at a time.
#
# Letters: N tokens, R rows of all A_i together. W_i and b_i are frozen.


class Adapted(NamedTuple):
    """A linear layer and the adapter on it, all of one dtype."""

    weight: Tensor  # [out, in], or the packed numbers of a quantised one
    bias: Tensor | None  # [out]
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float
    packing: Any = None  # bitsandbytes' QuantState of a layer in 4 bits, or a QuantisedLinear; None for other layers

    def base(self, x: Tensor) -> Tensor:
        """Returns [..., out] of the layer without its adapter, as a tensor of its own: models may write to it."""
        if self.packing is None or isinstance(self.packing, QuantisedLinear):
            return F.linear(x, self.whole(), self.bias)
        from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]  # imported here: slow, and few runs use it

        product: Tensor = matmul_4bit(x, self.weight, quant_state=self.packing, bias=self.bias)
        return product

    def whole(self) -> Tensor:
        """Returns the weight [out, in] in the adapter's dtype; a quantised weight is dequantized."""
        if self.packing is None:
            return self.weight
        if isinstance(self.packing, QuantisedLinear):
            return self.packing.whole()
        from bitsandbytes.functional import dequantize_4bit

        weight: Tensor = dequantize_4bit(self.weight, self.packing)
        return weight


def adapted_linear(x: Tensor, layers: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """Returns [..., out] of each layer for x [..., in]; differentiable once, in x and in every a and b."""
    return applied(_Linear, x, layers)


def applied(function: type[torch.autograd.Function], x: Tensor, layers: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """Applies an autograd function to x, the layers' other fields and their tensors. autograd needs tensors as separate
    arguments; `layers_of` makes layers of them again."""
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
    """Returns A, [R, in]: the matrices `a` of all layers, one below the other."""
    return layers[0].a if len(layers) == 1 else torch.cat([layer.a for layer in layers])


def _parts(wide: Tensor, layers: list[Adapted]) -> tuple[Tensor, ...]:
    """Splits [N, R] into the columns of each layer."""
    return torch.split(wide, [len(layer.a) for layer in layers], 1)


def _scaled_product(a: Tensor, b: Tensor, scale: float, out: Tensor) -> Tensor:
    return torch.addmm(out, a, b, beta=0, alpha=scale, out=out)


# LoRA layers in 16 bits on a CPU without instructions for 16-bit products, computed in float32.
#
# On such a CPU torch emulates 16-bit products at a fifth of the speed of float32 (Intel Ice Lake, one core: 31 and 157
# GFLOP/s). The formulas are those of adapted_linear, and inputs and outputs have 16 bits. h is not kept but computed
# again. Rows are converted a tile at a time, and weights a layer at a time, so that little memory is float32.

WIDENED_TILE = 1024  # rows of a tile
# Names in torch.cpu.get_capabilities() of x86 instructions for 16-bit products. On other processors torch decides.
INSTRUCTIONS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}


def slow_in(dtype: torch.dtype) -> bool:
    """Whether this processor is an x86 without instructions for products of that dtype."""
    there, wanted = torch.cpu.get_capabilities(), INSTRUCTIONS.get(dtype, ())
    return there["architecture"] == "x86_64" and bool(wanted) and not any(there.get(name, False) for name in wanted)


def widened_linear(x: Tensor, layers: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """Returns [..., out] of each layer for x [..., in], in x's dtype; differentiable once, in x and in every a and
    b."""
    return applied(_WidenedLinear, x, layers)


class _WidenedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rest: list[tuple[float, Any]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *tensors)
        ctx.rest = rest
        return tuple(_output(x, layer) for layer in layers_of(tensors, rest))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        sums = torch.float32 if len(grads) > 1 else x.dtype
        to_x = torch.zeros(x.shape, dtype=sums, device=x.device) if ctx.needs_input_grad[0] else None
        found: list[Tensor | None] = []
        for layer, grad in zip(layers_of(tensors, ctx.rest), grads, strict=True):
            found += [None, None, *_slopes(x, layer, grad, to_x)]
        return None if to_x is None else to_x.to(x.dtype), None, *found


def _output(x: Tensor, layer: Adapted) -> Tensor:
    weight, bias, a, b, scale, _ = _wide(layer)
    y = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype, device=x.device)
    for rows, into in zip(_tiles(x), _tiles(y), strict=True):
        wide = rows.float()
        into.copy_(F.linear(wide, weight, bias).addmm_(wide @ a.t(), b.t(), alpha=scale))
    return y


def _slopes(x: Tensor, layer: Adapted, grad: Tensor, to_x: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a and b; the gradient of x is added to `to_x`."""
    weight, _, a, b, scale, _ = _wide(layer)
    to_a, to_b = torch.zeros_like(a), torch.zeros_like(b)
    inputs = [None] * len(_tiles(x)) if to_x is None else _tiles(to_x)
    for rows, slopes, into in zip(_tiles(x), _tiles(grad), inputs, strict=True):
        wide, slope = rows.float(), slopes.float()
        thin = scale * (slope @ b)
        to_a.addmm_(thin.t(), wide)
        to_b.addmm_(slope.t(), wide @ a.t(), alpha=scale)
        if into is not None and into.dtype == torch.float32:
            into.addmm_(slope, weight).addmm_(thin, a)
        elif into is not None:  # a single layer reads x, so nothing needs to be added
            into.copy_((slope @ weight).addmm_(thin, a))
    return to_a.to(x.dtype), to_b.to(x.dtype)


def _wide(layer: Adapted) -> Adapted:
    """Returns the layer in float32."""
    bias = None if layer.bias is None else layer.bias.float()
    return Adapted(layer.whole().float(), bias, layer.a.float(), layer.b.float(), layer.scale)


def _tiles(x: Tensor) -> tuple[Tensor, ...]:
    """Splits [..., width] into tiles of at most WIDENED_TILE rows; they are views if x is contiguous."""
    return torch.split(x.reshape(-1, x.shape[-1]), WIDENED_TILE)


# `fuse` replaces the forward passes of PEFT's LoRA layers by the operations above.
#
# Layers of one module that read the same tensor are a group (q, k and v of an attention block; gate and up of an MLP).
# Groups are found by watching a forward pass, not by names. The layer of a group that is called first computes the
# outputs of all, and the others return theirs. The rest is left to PEFT: layers that are not nn.Linear (in 16, 32 or 4
# bits); variants such as DoRA; an adapter that is switched off, merged, or not on every layer of the group.


class _Ready:
    """The outputs that a group's first layer has computed for the layers called next; empty between two passes."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._outputs: dict[nn.Module, Tensor] = {}

    def keep(self, x: Tensor, outputs: dict[nn.Module, Tensor]) -> None:
        self._input, self._outputs = x, outputs

    def take(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """Removes and returns the layer's output for the tensor `x`; None if it was not computed."""
        output = self._outputs.pop(layer, None) if x is self._input else None
        if not self._outputs:
            self._input = None
        return output

    def clear(self, *_: Any) -> None:
        """Drops all outputs; a hook before each forward pass, since a pass that failed may have left outputs, and with
        them its graph."""
        self._input, self._outputs = None, {}


def fuse(lm: Any, run: Callable[[], object], *, on_card: bool) -> None:
    """Makes the LoRA layers of `lm` compute in groups, if it has any. `run`: runs a forward pass of the model."""
    homes = {layer: name.rpartition(".")[0] for name, layer in lm.named_modules() if _is_plain(layer)}
    if not homes:
        return
    ready = _Ready()
    decoder_of(lm).register_forward_pre_hook(ready.clear)
    for group in _groups(homes, run):
        widen = not on_card and slow_in(_type_of(group[0].base_layer))
        for layer in group:
            # The method is replaced on the instance, so that no name of a module or weight changes.
            layer.forward = partial(_forward, layer, group, ready, widen)


def _forward(
    layer: Any, group: Sequence[Any], ready: _Ready, widen: bool, x: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    made = ready.take(layer, x)
    if made is not None:
        return made
    name = _adapter(group)
    if name is None or args or kwargs:
        output: Tensor = type(layer).forward(layer, x, *args, **kwargs)
        return output
    wanted = group if layer is group[0] else [layer]
    linear = widened_linear if widen else adapted_linear
    outputs = dict(zip(wanted, linear(x, [_adapted(one, name) for one in wanted]), strict=True))
    own: Tensor = outputs.pop(layer)
    if outputs:
        ready.keep(x, outputs)
    return own


def _adapted(layer: Any, name: str) -> Adapted:
    base, a, b = layer.base_layer, layer.lora_A[name], layer.lora_B[name]
    return Adapted(base.weight, base.bias, a.weight, b.weight, layer.scaling[name], _packing(base))


def _adapter(group: Sequence[Any]) -> str | None:
    """Returns the adapter that is active on all layers of the group; None if they do not have a single one in
    common."""
    names = {name for layer in group for name in layer.active_adapters}
    if len(names) != 1 or any(layer.disable_adapters or layer.merged for layer in group):
        return None
    (name,) = names
    return name if all(name in layer.lora_A for layer in group) else None


def _groups(homes: Mapping[Any, str], run: Callable[[], object]) -> Iterator[list[Any]]:
    """Yields the groups of the layers, in the order in which a forward pass calls them.

    homes: layer -> name of the module that it belongs to. run: runs a forward pass.
    """
    inputs: dict[nn.Module, list[Tensor]] = {}
    hooks = [layer.register_forward_pre_hook(lambda layer, args: inputs.setdefault(layer, []).append(args[0]))
             for layer in homes]  # fmt: skip
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    groups: dict[Any, list[Any]] = {}
    for layer, seen in inputs.items():
        shared = (homes[layer], id(seen[0])) if len(seen) == 1 else layer  # a layer called more than once stays alone
        groups.setdefault(shared, []).append(layer)
    yield from groups.values()


def _is_plain(layer: nn.Module) -> bool:
    """Whether the layer computes W x + s B A x and nothing else, all in one dtype."""
    if not isinstance(layer, LoraLayer) or type(layer) is not _kind_of(layer.base_layer) or layer.lora_variant:
        return False
    wanted = _type_of(layer.base_layer)
    pairs = [part for name in layer.lora_A for part in (layer.lora_A[name], layer.lora_B[name])]
    return all(part.bias is None and part.weight.dtype == wanted for part in pairs)


def _kind_of(base: Any) -> type | None:
    """Returns the class of PEFT's layer around `base`; None if `base` is of a kind that is left to PEFT."""
    if type(base) in (nn.Linear, QuantisedLinear):
        return Linear
    if _packing(base) is None:
        return None
    from peft.tuners.lora.bnb import Linear4bit  # imported here: PEFT has the class only with bitsandbytes

    return Linear4bit if base.compute_dtype == _type_of(base) else None


def _packing(base: Any) -> Any:
    """Returns bitsandbytes' QuantState of a layer in 4 bits, and a layer of a quantised checkpoint itself; None for
    other layers."""
    if isinstance(base, QuantisedLinear):
        return base
    return getattr(getattr(base, "weight", None), "quant_state", None)


def _type_of(base: Any) -> torch.dtype:
    """Returns the dtype in which the layer's products are computed."""
    packing = _packing(base)
    kind: torch.dtype = base.weight.dtype if packing is None else packing.dtype
    return kind


# The linear layers that learner.lora.targets names.

log = logging.getLogger(__name__)

Wanted = Literal["all-linear"] | list[str]


def lora_targets(lm: Any, wanted: Wanted) -> list[str]:
    """Returns the names of the layers to adapt, or the last parts of names. The model may be without weights.

    all-linear means every nn.Linear except the output embedding; in a model with experts it means the attention layers.
    (PEFT's own all-linear also adapts experts and router, and gives fused experts twice the rank.) EXPERTS is no layer
    of PEFT's but stands for parameters (learner.model.experts).

    Raises:
        ValueError: a name is not that of a layer that can be adapted.
    """
    linear = linear_layers(lm)
    known = sorted({name.rpartition(".")[2] for name in linear})
    if EXPERTS in wanted:
        expert_parameters(lm)
    if has_experts(lm.config.to_dict()):
        return _attention(known, wanted)
    if wanted == "all-linear":
        return known
    for target in wanted:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            raise ValueError(
                f"learner.lora.targets: each must name linear layers of the model other than its output embedding, got "
                f"{target!r}; known: {', '.join(known)}, or all-linear"
            )
    return wanted


def check_targets(lm: Any, wanted: Wanted, found: Sequence[str], folder: str) -> None:
    """Checks the layers of an adapter: `found` is target_modules in its folder. Raises WrongInput if the model has no
    such layers that can be adapted, or if all-linear is wanted and means other layers."""
    try:
        lora_targets(lm, list(found))
    except ValueError as error:
        words = str(error).removeprefix("learner.lora.targets: ")
        raise WrongInput(f"model.adapter: target_modules of {folder}: {words}") from None
    if wanted != "all-linear":
        return
    leaves, meant = ({name.rpartition(".")[2] for name in names} for names in (found, lora_targets(lm, wanted)))
    if leaves != meant:
        raise WrongInput(
            f"model.adapter: target_modules of {folder} must be those of learner.lora.targets=all-linear, "
            f"{', '.join(sorted(meant))}, got {', '.join(sorted(leaves))}; set learner.lora.targets to the adapter's"
        )


def _attention(known: list[str], wanted: Wanted) -> list[str]:
    there = [name for name in ATTENTION if name in known]
    if there != list(ATTENTION):
        raise ValueError(
            f"model.path: of a model with experts {', '.join(ATTENTION)} are adapted, and this one has "
            f"{', '.join(known)}; give another architecture (docs/models.md)"
        )
    if wanted == "all-linear":
        log.warning("learner.lora.targets: all-linear of a model with experts is its attention (%s); a list that also "
                    "has %s adapts them, too (on a CPU with push=merged)", ", ".join(there), EXPERTS)  # fmt: skip
        return there
    for target in wanted:
        if target != EXPERTS and target.rpartition(".")[2] not in there:
            raise ValueError(
                f"learner.lora.targets: of a model with experts only {', '.join(there)} and {EXPERTS} are adapted, got "
                f"{target!r}; leave it out"
            )
    return wanted


POLICY, REFERENCE = "default", "reference"
# PEFT's warning where a text part, which has no towers, gets an adapter whose configuration excludes them.
NONE_EXCLUDED = "You have passed exclude_modules"


def attach(lm: Any, model: ModelConfig, lora: LoraConfig, seed: int) -> Any:
    """Returns the PEFT model with the policy's adapter: a new one, or that of model.adapter.

    If the reference is an adapter, too (model.reference, or else the adapter that training starts from), it is a
    second, frozen adapter on the same base; otherwise the reference is the base alone.
    """
    if model.adapter is not None:
        content = read_adapter(model.adapter, "model.adapter")
        check_same(lora, content, model.adapter, LoraConfig.model_fields)
        check_targets(lm, lora.targets, targets_of(content), model.adapter)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Found missing adapter keys")  # Policy.load reports missing weights
            warnings.filterwarnings("ignore", NONE_EXCLUDED)
            wrapped: Any = peft.PeftModel.from_pretrained(
                lm, model.adapter, adapter_name=POLICY, is_trainable=True, key_mapping=NAMES
            )
    else:
        wrapped = _fresh(lm, lora, seed)
    reference = model.reference or model.adapter
    if reference is not None:
        _add_reference(wrapped, reference, lm.dtype)
    return wrapped


def _add_reference(wrapped: Any, folder: str, dtype: torch.dtype) -> None:
    """Loads the adapter of a folder as the reference: frozen, in the base's dtype.

    Raises:
        WrongInput: it is not a plain LoRA adapter of this base, or holds numbers that are not finite.
    """
    what = f"adapter {REFERENCE!r}"
    read_adapter(folder, what)
    tensors = text_adapter(load_file(Path(folder) / WEIGHTS_FILE))
    modes = [(module, module.training) for module in wrapped.modules()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", NONE_EXCLUDED)
        wrapped.load_adapter(folder, REFERENCE, is_trainable=False, key_mapping=NAMES)
    for module, training in modes:  # PEFT calls eval() on all modules; checkpointing and 4-bit layers read the flag
        module.training = training
    own = {name: weight for name, weight in wrapped.named_parameters() if f".{REFERENCE}." in name}
    named = {name.replace(f".{REFERENCE}.", "."): weight for name, weight in own.items()}
    if odd := difference(named, tensors):  # PEFT initialises missing weights and ignores others, without an error
        raise WrongInput(f"{what}: {folder} must have the names and shapes of model.path, {odd}; give another")
    check_finite(tensors.items(), folder, what)
    for weight in own.values():
        weight.data = weight.data.to(dtype)
        weight.requires_grad = False


def attach_beside(wrapped: Any, name: str, lora: LoraConfig, seed: int) -> dict[str, nn.Parameter]:
    """Adds a new adapter `name` to the PEFT model, for the policy of another run: as `_fresh` makes the first policy's
    with this seed, on the same layers, with the rank and alpha of `lora`. What is trained so far, and which adapter is
    active, stay as they are. Returns its weights by PEFT's names of adapter weights."""
    settings = copy.deepcopy(wrapped.peft_config[POLICY])
    settings.r, settings.lora_alpha = lora.rank, lora.alpha
    settings.inference_mode, settings.init_lora_weights = False, True
    with unchanged(wrapped), torch.random.fork_rng():
        torch.manual_seed(seed)
        wrapped.add_adapter(name, settings)
    weights = adapter_weights(wrapped, name)
    for weight in weights.values():
        weight.requires_grad = True
    return weights


def adapter_weights(wrapped: Any, name: str) -> dict[str, nn.Parameter]:
    """Returns the weights of the adapter `name` by PEFT's names of adapter weights."""
    # The whole end of a name is compared, since a layer of the model may have the adapter's name.
    ends = (f".lora_A.{name}.weight", f".lora_B.{name}.weight")
    return {
        f"{place.removesuffix(f'.{name}.weight')}.weight": weight
        for place, weight in wrapped.named_parameters()
        if place.endswith(ends)
    }


@contextmanager
def unchanged(wrapped: Any) -> Iterator[None]:
    """Restores what PEFT changes when it adds an adapter: requires_grad of all weights, and the flag `training` of all
    modules, which checkpointing and 4-bit layers read."""
    modes = [(module, module.training) for module in wrapped.modules()]
    trained = [(weight, weight.requires_grad) for weight in wrapped.parameters()]
    yield
    for module, training in modes:
        module.training = training
    _set_trained(trained)


@contextmanager
def acting_as(wrapped: Any, name: str | None, policy: str = POLICY) -> Iterator[None]:
    """Inside this block the model computes with the adapter `name`, or with the base alone (None); after it with the
    adapter `policy`.

    requires_grad of all weights stays as it is: PEFT's switches set it, so it is restored. A backward pass must be in
    the block of its forward pass, since activation checkpointing computes layers again.
    """
    trained = [(weight, weight.requires_grad) for weight in wrapped.parameters()]
    try:
        if name is None:
            with wrapped.disable_adapter():
                yield
        else:
            wrapped.set_adapter(name)
            _set_trained(trained)
            yield
    finally:
        wrapped.set_adapter(policy)
        _set_trained(trained)


def _set_trained(weights: Sequence[tuple[Tensor, bool]]) -> None:
    for weight, wanted in weights:
        weight.requires_grad = wanted


def as_json(config: peft.PeftConfig) -> dict[str, Any]:
    """Returns the content of adapter_config.json."""
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in config.to_dict().items()}
    plain["inference_mode"] = True
    return {name: getattr(value, "value", value) for name, value in plain.items()}


def _fresh(lm: Any, lora: LoraConfig, seed: int) -> Any:
    targets = lora_targets(lm, lora.targets)
    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=[target for target in targets if target != EXPERTS],
        target_parameters=expert_parameters(lm) if EXPERTS in targets else None,
        lora_dropout=0.0,
        bias="none",
        task_type=peft.TaskType.CAUSAL_LM,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return peft.get_peft_model(lm, settings, adapter_name=POLICY)
        except ValueError as error:
            whole = re.sub(r"\(\n.*\n\)", "", str(error), flags=re.DOTALL)  # PEFT's message prints a module's layers
            first = whole.partition(". ")[0].removeprefix("[PEFT:PeftType.LORA] ")
            raise ValueError(f"learner.lora.targets: {first} (PEFT), got {', '.join(targets)}; name others") from None
