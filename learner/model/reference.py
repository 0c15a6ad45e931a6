"""The reference of a model that is trained as a whole: a second, frozen set of its weights, which takes the place of
the first for a pass without gradient. (An adapter's reference is its base, for 0 bytes: learner.model.lora.)

In 8 bits (model.reference_dtype: int8) every matrix but the embeddings and the head is held as whole numbers up to 127
and a scale per row, which is the row's largest weight over 127, and multiplied out for its own product alone: half the
bytes of 16 bits. The reference is then a little another one: for the model of configs/gsm8k_cpu.yaml in bfloat16 its
logprobs of GSM8K's texts differ by 0.009 nats in the mean, a KL of 9e-5 nats.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from learner.config import ModelConfig
from learner.model.adapter_config import check_reference
from learner.model.base import load_base, to_eval
from learner.model.fusion import fuse_frozen

LEVELS = 127


class _Narrow(NamedTuple):
    """A matrix of the reference in 8 bits, beside the trained weight that it replaces for a pass."""

    module: nn.Module
    weight: Tensor
    numbers: Tensor  # int8, of the weight's shape
    scales: Tensor  # [..., 1] in the weight's type

    def widen(self, *_: Any) -> None:
        """To be called before the module: it computes with the reference's weight."""
        self.weight.data = self.numbers.to(self.scales.dtype).mul_(self.scales)

    def drop(self, *_: Any) -> None:
        """To be called after the module. Code that uses the weight outside of its module finds it empty, and fails."""
        self.weight.data = self.scales.new_empty(0)


class Reference:
    """A frozen copy of a model's weights.

    Args:
        lm: whose weights it takes the place of; with model.reference null it is a copy of them as they are now.
        model: where the reference comes from, and how it is held.
        try_out: a pass of any kind through lm.

    Raises:
        WrongInput: model.reference is not of the architecture of model.path.
        ValueError: int8 does not work with it.
    """

    def __init__(self, lm: Any, model: ModelConfig, try_out: Callable[[], object]) -> None:
        named = {id(weight): name for name, weight in lm.state_dict(keep_vars=True).items()}  # tied ones once
        own = {name: weight for name, weight in lm.state_dict(keep_vars=True).items() if named[id(weight)] == name}
        source = own if model.reference is None else _weights_of(model.reference, model)
        wide = {id(module.weight) for module in lm.modules() if isinstance(module, nn.Embedding)}
        wide.add(id(lm.get_output_embeddings().weight))
        self._whole: list[tuple[Tensor, Tensor]] = []
        self._narrow: list[_Narrow] = []
        for name, weight in own.items():
            values = source[name].detach().to(weight.device, weight.dtype)
            if model.reference_dtype == "auto" or weight.ndim < 2 or id(weight) in wide:
                self._whole.append((weight, values.clone() if model.reference is None else values))
            else:
                self._narrow.append(_narrowed(lm.get_submodule(name.rpartition(".")[0]), weight, values))
        if self._narrow:
            self._try_out(try_out, model.path)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Inside this block the model computes with the reference's weights; no gradient may be taken."""
        own = [(weight, weight.data) for weight, *_ in self._whole]
        own += [(narrow.weight, narrow.weight.data) for narrow in self._narrow]
        hooks: list[RemovableHandle] = []
        try:
            for weight, values in self._whole:
                weight.data = values
            for narrow in self._narrow:
                narrow.drop()
                hooks.append(narrow.module.register_forward_pre_hook(narrow.widen))
                hooks.append(narrow.module.register_forward_hook(narrow.drop))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for weight, values in own:
                weight.data = values

    def _try_out(self, run: Callable[[], object], path: str) -> None:
        try:
            with self.acting(), torch.no_grad():
                run()
        except RuntimeError as error:
            raise ValueError(
                f"model.reference_dtype: int8 needs every matrix to be used by its own module, and {path} uses one "
                f"elsewhere ({str(error).splitlines()[0]}); set it to auto"
            ) from None


def _weights_of(folder: str, model: ModelConfig) -> Mapping[str, Tensor]:
    """Of the model of a folder or hub name, in main memory."""
    check_reference(folder, model.source)
    model = model.model_copy(update={"path": folder, "revision": None})
    other = load_base(model, torch.device("cpu"), lora=False, key="model.reference")
    weights: dict[str, Tensor] = other.state_dict()
    return weights


def _narrowed(module: nn.Module, weight: Tensor, values: Tensor) -> _Narrow:
    """Rounded to the nearest of 255 levels of each row; the scale is that of the type it is used in."""
    largest = values.abs().amax(-1, keepdim=True)
    scales = (largest.float() / LEVELS).clamp(min=torch.finfo(values.dtype).tiny).to(values.dtype)
    numbers = (values.float() / scales.float()).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
    return _Narrow(module, weight, numbers, scales)


# The reference of a model that is trained as a whole in shards (memory.layout: sharded): a second model, frozen, whose
# shards have model.dtype, in the place of the first for a pass without gradient.
#
# Not the first with other weights, as where a model is whole: what FSDP2 gathers from is the float32 memory
# that the optimizer updates, so there the second set would be float32 as well, and be copied in and out for each step.


class ShardedReference:
    """It computes as the trained model does, whose classes and settings it has: kernels and attention are those that
    were tried with that one. All ranks make theirs at once, and are in its passes together.

    Args:
        lm: the trained model, ready for its passes.
        model: where the reference comes from; with model.reference null it is what the files of model.path hold.

    Raises:
        WrongInput: model.reference is not of the architecture of model.path.
        ValueError, WrongInput: its files cannot be read in parts, or at all (learner.model.sharded_base).
    """

    def __init__(self, lm: Any, model: ModelConfig, device: torch.device) -> None:
        key = "model.path"
        if model.reference is not None:
            check_reference(model.reference, model.source)
            model, key = model.model_copy(update={"path": model.reference, "revision": None}), "model.reference"
        self._lm = lm
        self._frozen = load_base(model, device, lora=False, sharded=True, trained=False, key=key)
        to_eval(self._frozen)
        fuse_frozen(self._frozen, on_card=device.type == "cuda")
        self._frozen.set_attn_implementation(lm.config._attn_implementation)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Inside this block the reference's layers and head are in the place of the trained model's; no gradient may be
        taken."""
        own, self._lm._modules = self._lm._modules, self._frozen._modules
        try:
            yield
        finally:
            self._lm._modules = own
