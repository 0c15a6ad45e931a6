"""Which of PEFT's LoRA layers are computed by learner.model.fused_lora or widened_lora, and which of them together.

Layers of one module that read the same tensor are a group (q, k and v of an attention block; gate and up of an MLP),
found by watching one pass, not by their names. The first that is called computes for all, and the others hand out what
it made. Everything else is left to PEFT: layers of another kind than nn.Linear, in 16 or 32 bits or in 4; variants such
as DoRA; an adapter that is switched off, merged, or not on every layer of the group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import Linear, LoraLayer
from torch import Tensor, nn

from learner.model.fused_lora import Adapted, adapted_linear
from learner.model.widened_lora import slow_in, widened_linear


class _Ready:
    """Outputs that a group's first layer made for those which are called next; empty between two passes."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._outputs: dict[nn.Module, Tensor] = {}

    def keep(self, x: Tensor, outputs: dict[nn.Module, Tensor]) -> None:
        self._input, self._outputs = x, outputs

    def take(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """The layer's output for this very tensor, once."""
        output = self._outputs.pop(layer, None) if x is self._input else None
        if not self._outputs:
            self._input = None
        return output

    def clear(self, *_: Any) -> None:
        """To be called before a pass: one that broke off may have left some, and with them all that it kept."""
        self._input, self._outputs = None, {}


def fuse(lm: Any, run: Callable[[], object], *, on_card: bool) -> None:
    """Makes the LoRA layers of `lm` compute in groups, if it has any. `run`: one pass through the model."""
    homes = {layer: name.rpartition(".")[0] for name, layer in lm.named_modules() if _is_plain(layer)}
    if not homes:
        return
    ready = _Ready()
    lm.base_model.register_forward_pre_hook(ready.clear)
    for group in _groups(homes, run):
        widen = not on_card and slow_in(_type_of(group[0].base_layer))
        for layer in group:
            # On the instance, as learner.model.activation_checkpointing does it: no name changes.
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
    """The adapter that all layers of the group apply now, if it is one and the same."""
    names = {name for layer in group for name in layer.active_adapters}
    if len(names) != 1 or any(layer.disable_adapters or layer.merged for layer in group):
        return None
    (name,) = names
    return name if all(name in layer.lora_A for layer in group) else None


def _groups(homes: Mapping[Any, str], run: Callable[[], object]) -> Iterator[list[Any]]:
    """Of the layers, each with the name of its module, in the order in which a pass calls them."""
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
        shared = (homes[layer], id(seen[0])) if len(seen) == 1 else layer  # one that is called often stays alone
        groups.setdefault(shared, []).append(layer)
    yield from groups.values()


def _is_plain(layer: nn.Module) -> bool:
    """W x + s B A x, and nothing else: its types are one."""
    if not isinstance(layer, LoraLayer) or type(layer) is not _kind_of(layer.base_layer) or layer.lora_variant:
        return False
    wanted = _type_of(layer.base_layer)
    pairs = [part for name in layer.lora_A for part in (layer.lora_A[name], layer.lora_B[name])]
    return all(part.bias is None and part.weight.dtype == wanted for part in pairs)


def _kind_of(base: Any) -> type | None:
    """PEFT's layer around it, if it is of a kind that is known here."""
    if _packing(base) is None:
        return Linear if type(base) is nn.Linear else None
    from peft.tuners.lora.bnb import Linear4bit  # here: there is none without bitsandbytes

    return Linear4bit if base.compute_dtype == _type_of(base) else None


def _packing(base: Any) -> Any:
    """bitsandbytes' QuantState, of a layer in 4 bits."""
    return getattr(getattr(base, "weight", None), "quant_state", None)


def _type_of(base: Any) -> torch.dtype:
    """That its products are computed in."""
    packing = _packing(base)
    kind: torch.dtype = base.weight.dtype if packing is None else packing.dtype
    return kind
