"""The reference of a model that is trained as a whole: frozen weights that replace the trained ones for a pass without
gradient. `Reference` is for a model that is whole in each process, `ShardedReference` for a sharded model. (With an
adapter the reference is the base, without further memory: learner.model.lora.)

In 8 bits (model.reference_dtype: int8) every matrix except the embeddings and the head is held as integers up to 127
and a scale per row, which is the row's largest weight / 127. A matrix is dequantized only while its module computes, so
it takes half the bytes of 16 bits. Such a reference differs slightly from the exact one: for the model of
configs/gsm8k_cpu.yaml in bfloat16 the logprobs of GSM8K's texts differ by 0.009 nats in the mean, a KL of 9e-5 nats.
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
from learner.model.recurrence import carry_as

LEVELS = 127


class _Narrow(NamedTuple):
    """A matrix of the reference in 8 bits, and the trained weight that it replaces for a pass."""

    module: nn.Module  # module of the trained weight
    weight: Tensor  # the trained weight
    numbers: Tensor  # int8, of the weight's shape
    scales: Tensor  # [..., 1] in the weight's dtype

    def widen(self, *_: Any) -> None:
        """Gives the module the reference's weight; a hook before the module's forward pass."""
        self.weight.data = self.numbers.to(self.scales.dtype).mul_(self.scales)

    def drop(self, *_: Any) -> None:
        """Frees the reference's weight; a hook after the module's forward pass. Code that uses the weight outside of
        its module finds it empty, and fails."""
        self.weight.data = self.scales.new_empty(0)


class Reference:
    """A frozen set of weights that can take the place of a model's weights.

    Args:
        lm: the trained model; with model.reference null the reference is a copy of its weights as they are now.
        model: settings that say where the reference comes from, and whether it is held in 8 bits.
        try_out: runs any forward pass through lm, to try whether int8 works.

    Raises:
        WrongInput: model.reference is not of the architecture of model.path.
        ValueError: the model uses a matrix outside of its module, so int8 does not work.
    """

    def __init__(self, lm: Any, model: ModelConfig, try_out: Callable[[], object]) -> None:
        named = {id(weight): name for name, weight in lm.state_dict(keep_vars=True).items()}  # tied weights count once
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
        """Inside this block the model computes with the reference's weights; backward must not be called."""
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
    """Returns the weights of the model of a folder or hub name, in main memory."""
    check_reference(folder, model.source)
    model = model.model_copy(update={"path": folder, "revision": None})
    other = load_base(model, torch.device("cpu"), lora=False, key="model.reference")
    weights: dict[str, Tensor] = other.state_dict()
    return weights


def _narrowed(module: nn.Module, weight: Tensor, values: Tensor) -> _Narrow:
    """Quantizes a matrix to the nearest of 255 levels of each row. The scale is first rounded to the weight's dtype, in
    which it will be multiplied."""
    largest = values.abs().amax(-1, keepdim=True)
    scales = (largest.float() / LEVELS).clamp(min=torch.finfo(values.dtype).tiny).to(values.dtype)
    numbers = (values.float() / scales.float()).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
    return _Narrow(module, weight, numbers, scales)


class ShardedReference:
    """A second, frozen model, sharded over the ranks, whose modules take the place of a sharded model's (memory.layout:
    sharded).

    It computes with the attention and the kernels that were tried with the trained model. All ranks make theirs at the
    same time, and run its passes together. It is not a second set of weights for the trained model, as Reference is:
    FSDP2 gathers from the float32 memory that the optimizer updates, so that set would have to be float32, too, and be
    copied in and out for each step. The shards of this model have model.dtype.

    Args:
        lm: the trained model, ready for its passes.
        model: settings that say where the reference comes from; with model.reference null it is read from model.path.
        device: the device of this rank.

    Raises:
        WrongInput: model.reference is not of the architecture of model.path.
        ValueError, WrongInput: its files cannot be read in parts, or at all (learner.model.bases.sharded).
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
        carry_as(self._frozen, lm)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Inside this block the reference's layers and head take the place of the trained model's; backward must not be
        called."""
        own, self._lm._modules = self._lm._modules, self._frozen._modules
        try:
            yield
        finally:
            self._lm._modules = own
