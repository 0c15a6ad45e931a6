"""A base model on the generator's weights: the learner maps the generator's memory and has no copy (memory.layout:
shared).
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import BitsAndBytesConfig

from cluster import machine
from cluster.errors import WrongInput
from learner.model.bases.empty import empty_model
from rollout import shared_base
from rollout.shared_base import digests_of_pieces
from rollout.types import Manifest, Quantised

# Layers in 4 bits on the generator's memory (model.base: nf4): bitsandbytes' Linear4bit, as transformers would make
# them, except that the generator's scales are float32 and not nested. The dequantised weights are the same bit for bit,
# since bitsandbytes makes un-nested scales of nested ones before each use. So the learner computes with the numbers
# that the generator serves, whatever type the files have. With a base of its own the learner quantises what it has cast
# to model.dtype, and vLLM quantises what is stored.


def replace_layers(lm: Any, names: Collection[str], quantization: BitsAndBytesConfig) -> None:
    """Replaces each linear layer whose weight is named by a 4-bit layer, still without weights."""
    from bitsandbytes.nn.modules import Linear4bit  # imported here: it is slow, and few runs use it

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
    lm.is_loaded_in_4bit = True  # PEFT reads this flag


def weight_of(layer: Any, packed: Tensor, scales: Tensor, quantised: Quantised) -> Any:
    """Returns the weight of a 4-bit layer from its packed numbers [out * in / 2, 1] and scales [out * in / block]."""
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


SHOWN = 3  # number of weights that a message names


class MappedBase:
    """A generator's parameters mapped into this process, and the model whose weights are views of them.

    On a GPU this process could write to the mapped memory; on a CPU a write ends the process. The learner does not
    write to a frozen base, and `check` raises if something did. While the generator is replaced the model has no
    weights (`detach`), so that two bases are never in memory at once.

    Args:
        manifest: what the generator says of its parameters, and where they lie.
        device: the learner's device, which must be the generator's.

    Raises:
        WrongInput: the memory cannot be mapped, or its content is not what the generator loaded.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._device = device
        self._manifest = manifest
        self._pieces = _mapped(manifest, device)
        self._weights: dict[str, Any] = {}  # the model's weights by their names in the checkpoint

    @property
    def nbytes(self) -> int:
        """Bytes of all mapped memory; on a CPU the operating system counts them in this process's resident set."""
        types = [(piece, getattr(torch, piece.dtype)) for piece in self._manifest.pieces.values()]
        return sum(piece.elements * dtype.itemsize for piece, dtype in types)

    def model(
        self, config: Any, dtype: torch.dtype, quantization: BitsAndBytesConfig | None = None, **options: Any
    ) -> Any:
        """Returns the causal language model of a transformers config on the mapped weights.

        quantization: bitsandbytes' configuration of a base in 4 bits; None: 16 or 32 bits. options: arguments of
        `from_config`.

        Raises WrongInput with the names of weights that the generator does not hold as the checkpoint has them.
        """
        lm = empty_model(config, dtype, **options)
        wanted: dict[str, Tensor] = dict(lm.named_parameters())  # tied weights count once
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
        return lm.to(self._device)  # moves the buffers; the weights are on the device already

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
        """Takes the weights from the model and ends the mapping; does nothing if there is none.

        Raises RuntimeError if something still holds a part of the mapped memory.
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
        """Maps the weights of a fresh generator and gives them to the model.

        Raises WrongInput if they are not, bit for bit, those of the previous generator.
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
        """Raises RuntimeError if the base has changed since the generator loaded it; reads all of the base."""
        if changed := _changed(self._pieces, self._manifest):
            raise RuntimeError(
                f"memory.layout: something has written to the shared base: {len(changed)} of the generator's "
                f"parameters are not what they were, first {changed[0]}; start the run again, with memory.layout=auto"
            )


def no_views(
    wanted: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], refused: Mapping[str, str]
) -> dict[str, str]:
    """Returns the weights of a model that cannot be views of the generator's parameters, each with the reason.

    wanted: the model's weights. shapes: shapes of the tensors that are views, by their names in the checkpoint.
    refused: the reason for each other tensor of the checkpoint.
    """
    wrong = {name: refused.get(name, "the checkpoint has no such tensor") for name in wanted if name not in shapes}
    for name in wanted.keys() & shapes.keys():
        if shapes[name] != tuple(wanted[name].shape):
            wrong[name] = f"it has the shape {list(shapes[name])} there, and {list(wanted[name].shape)} here"
    return wrong


def refusal(wrong: Mapping[str, str], weights: int) -> str:
    """Returns the message for the weights that `no_views` found. weights: the number of weights of the model."""
    told = "; ".join(f"{name}: {wrong[name]}" for name in sorted(wrong)[:SHOWN])
    return (
        "memory.layout: shared needs every weight of the model as a view of the generator's, and "
        f"{len(wrong)} of {weights} are none ({told}); set memory.layout=auto"
    )


def _mapped(manifest: Manifest, device: torch.device) -> dict[str, Tensor]:
    """Maps the generator's parameters, and checks their content against the manifest's digests."""
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
