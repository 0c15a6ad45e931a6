"""The base model as the generator holds it: the learner maps its memory and has no copy (memory.layout: shared)."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from cluster import machine
from cluster.errors import WrongInput
from rollout import shared_base
from rollout.shared_base import digests_of_pieces
from rollout.types import Manifest, Quantised

# Layers in 4 bits on memory of a generator (memory.layout: shared, model.base: nf4): bitsandbytes' own Linear4bit, as
# transformers would have made them, but for their scales, which the generator holds in float32 and not nested.
#
# What is multiplied out is the same to the bit: un-nested scales are what bitsandbytes makes of nested ones each time.
# So the learner computes with the numbers that the generator serves, whatever type the files have. With a base of its
# own it quantises what it has cast to model.dtype, and vLLM what is stored.


def replace_layers(lm: Any, names: Collection[str], quantization: BitsAndBytesConfig) -> None:
    """Puts a layer in 4 bits, still without weights, in the place of each linear layer whose weight is named."""
    from bitsandbytes.nn.modules import Linear4bit  # here: slow to import, and few runs use it

    for name in names:
        path = name.removesuffix(".weight")
        plain: nn.Linear = lm.get_submodule(path)
        with torch.device("meta"):
            layer = Linear4bit(  # type: ignore[no-untyped-call]
                plain.in_features,
                plain.out_features,
                plain.bias is not None,
                compute_dtype=quantization.bnb_4bit_compute_dtype,
                quant_type=quantization.bnb_4bit_quant_type,
            )
        lm.set_submodule(path, layer)
    lm.is_loaded_in_4bit = True  # what PEFT goes by


def weight_of(layer: Any, packed: Tensor, scales: Tensor, quantised: Quantised) -> Any:
    """The weight of such a layer: [out * in / 2, 1] packed, with its scales [out * in / block]."""
    from bitsandbytes.functional import QuantState, get_4bit_type
    from bitsandbytes.nn.modules import Params4bit

    layer.quant_state = QuantState(  # type: ignore[no-untyped-call]
        absmax=scales,
        shape=torch.Size(quantised.shape),
        code=get_4bit_type("nf4", device=packed.device),  # type: ignore[no-untyped-call]
        blocksize=quantised.block,
        quant_type="nf4",
        dtype=layer.compute_dtype,
    )
    return Params4bit(
        packed,
        requires_grad=False,
        quant_state=layer.quant_state,
        blocksize=quantised.block,
        quant_type="nf4",
        bnb_quantized=True,
        module=layer,
    )


SHOWN = 3  # names in a message


class MappedBase:
    """Views of a generator's parameters, in the place of the weights of a model here.

    On a card the memory can be written from here, and on a CPU a write ends the process. Nothing here writes to a
    frozen base; `check` would say so. While the generator is replaced the model has no weights (`detach`), so that two
    bases never lie in memory at once.

    Args:
        manifest: of the generator.
        device: of the learner; the generator's.

    Raises:
        WrongInput: it cannot be mapped, or what is mapped is not what the generator loaded.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._device = device
        self._manifest = manifest
        self._pieces = _mapped(manifest, device)
        self._weights: dict[str, Any] = {}  # of the model, by the checkpoint's name

    @property
    def nbytes(self) -> int:
        """Of all that is mapped; on a CPU the operating system counts them as memory of this process, too."""
        types = [(piece, getattr(torch, piece.dtype)) for piece in self._manifest.pieces.values()]
        return sum(piece.elements * dtype.itemsize for piece, dtype in types)

    def model(
        self, config: Any, dtype: torch.dtype, quantization: BitsAndBytesConfig | None = None, **options: Any
    ) -> Any:
        """The causal language model of a transformers config, on these weights. quantization: of a base in 4 bits;
        options: of `from_config`.

        Raises WrongInput with the names of weights that the generator does not hold as the checkpoint has them.
        """
        with init_empty_weights(include_buffers=False):  # buffers are computed, and no part of a checkpoint
            lm: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=dtype, trust_remote_code=False, **options
            )
        lm.tie_weights()
        wanted: dict[str, Tensor] = dict(lm.named_parameters())  # one that is tied to another once
        self._check_all_there(lm, wanted, dtype, in_4_bits=quantization is not None)
        if quantization is not None:
            replace_layers(lm, wanted.keys() & self._manifest.quantised, quantization)
        for name in wanted:
            path, _, leaf = name.rpartition(".")
            module, quantised = lm.get_submodule(path), self._manifest.quantised.get(name)
            if quantised is None:
                weight: Any = nn.Parameter(self._view(name), requires_grad=False)
            else:
                weight = weight_of(module, self._view(name), self._pieces[quantised.scales], quantised)
            setattr(module, leaf, weight)
            self._weights[name] = weight
        lm.tie_weights()
        return lm.to(self._device)  # the buffers; the weights are there

    def _view(self, name: str) -> Tensor:
        view = self._manifest.views[name]
        piece = self._pieces[view.parameter]
        return piece.as_strided(view.shape, view.strides, piece.storage_offset() + view.offset)

    def _check_all_there(self, lm: Any, wanted: dict[str, Tensor], dtype: torch.dtype, *, in_4_bits: bool) -> None:
        views, quantised = self._manifest.views, self._manifest.quantised if in_4_bits else {}
        shapes = {name: view.shape for name, view in views.items()}
        shapes |= {name: one.shape for name, one in quantised.items()}
        wrong = no_views(wanted, shapes, self._manifest.refused)
        for name in wanted.keys() - wrong.keys():
            there = self._manifest.pieces[views[name].parameter].dtype
            if name in quantised and type(lm.get_submodule(name.rpartition(".")[0])) is not nn.Linear:
                wrong[name] = "it is in 4 bits there, and no weight of a linear layer here"
            elif name not in quantised and getattr(torch, there) != dtype:
                wrong[name] = f"it is {there} there"
        if wrong:
            raise WrongInput(refusal(wrong, len(wanted)))

    def detach(self) -> None:
        """Takes the weights from the model and ends the mapping. Nothing happens without one.

        Raises RuntimeError if something still holds a part of it.
        """
        storages = {piece.untyped_storage()._cdata: piece.untyped_storage() for piece in self._pieces.values()}
        mapped = [StorageWeakRef(storage) for storage in storages.values()]  # type: ignore[no-untyped-call]
        self._pieces, storages = {}, {}
        for name, weight in self._weights.items():
            weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
            if name in self._manifest.quantised:
                weight.quant_state.absmax = torch.empty(0, device=weight.device)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        if left := sum(not storage.expired() for storage in mapped):  # type: ignore[no-untyped-call]
            raise RuntimeError(
                f"memory.layout: {left} of {len(mapped)} mappings of the lost generator's base are in use"
            )

    def attach(self, manifest: Manifest) -> None:
        """Gives the model the weights of a fresh generator.

        Raises WrongInput if they are not those of the one before, bit for bit.
        """
        before = self._manifest
        if manifest.owner == before.owner:
            raise WrongInput("memory.layout: the manifest is of the generator that was lost, not of the one after it")
        if (manifest.views, manifest.quantised) != (before.views, before.quantised) or (
            _digests(manifest) != _digests(before)
        ):
            raise WrongInput(
                "memory.layout: shared: a fresh generator holds another base than the one before; the files of "
                "model.path must not change while a run lasts; start the run again"
            )
        self._pieces, self._manifest = _mapped(manifest, self._device), manifest
        for name, weight in self._weights.items():
            weight.data = self._view(name)
            if name in manifest.quantised:
                weight.quant_state.absmax = self._pieces[manifest.quantised[name].scales]

    def check(self) -> None:
        """Raises RuntimeError if the base is not what it was when the generator had loaded it."""
        if changed := _changed(self._pieces, self._manifest):
            raise RuntimeError(
                f"memory.layout: something has written to the shared base: {len(changed)} of the generator's "
                f"parameters are not what they were, first {changed[0]}; start the run again, with memory.layout=auto"
            )


def no_views(
    wanted: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], refused: Mapping[str, str]
) -> dict[str, str]:
    """Which of a model's weights a generator does not hold as views, and why.

    shapes: of the tensors that it holds so, by the checkpoint's name. refused: why others are no views.
    """
    wrong = {name: refused.get(name, "the checkpoint has no such tensor") for name in wanted if name not in shapes}
    for name in wanted.keys() & shapes.keys():
        if shapes[name] != tuple(wanted[name].shape):
            wrong[name] = f"it has the shape {list(shapes[name])} there, and {list(wanted[name].shape)} here"
    return wrong


def refusal(wrong: Mapping[str, str], weights: int) -> str:
    """What a user is told of such weights. weights: how many the model has."""
    told = "; ".join(f"{name}: {wrong[name]}" for name in sorted(wrong)[:SHOWN])
    return (
        "memory.layout: shared needs every weight of the model as a view of the generator's, and "
        f"{len(wrong)} of {weights} are none ({told}); set memory.layout=auto"
    )


def _mapped(manifest: Manifest, device: torch.device) -> dict[str, Tensor]:
    """Each piece, once its content is what the generator says."""
    here = shared_base.card_of(device) if device.type == "cuda" else machine.name()
    if here != manifest.device:
        raise WrongInput(
            f"memory.layout: shared needs generator and learner on one device, got {manifest.device} and {here}; set "
            "memory.layout=auto"
        )
    if manifest.transport == "cuda_ipc":
        pieces = shared_base.map_card(manifest, device)
    else:
        pieces = shared_base.map_file(manifest)
    if changed := _changed(pieces, manifest):
        raise WrongInput(
            f"memory.layout: shared: {len(changed)} of the generator's parameters have another content here than "
            f"there, first {changed[0]}; set memory.layout=auto"
        )
    return pieces


def _changed(pieces: dict[str, Tensor], manifest: Manifest) -> list[str]:
    return [name for name, digest in digests_of_pieces(pieces).items() if digest != manifest.pieces[name].digest]


def _digests(manifest: Manifest) -> dict[str, str]:
    return {name: piece.digest for name, piece in manifest.pieces.items()}
