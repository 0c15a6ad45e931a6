"""Loads an engine's base model so that the learner can map it (memory.layout: shared).

While vLLM loads the checkpoint, a recorder notes where each tensor goes (`recorded`). manifest_of then describes the
loaded model. On a CPU the parameters are put into a file that other processes can map. The names of vLLM that are used
here are the same from 0.31 to 0.33.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.config import LoadConfig
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from cluster import machine
from rollout import shared_base
from rollout.data.model_files import split
from rollout.shared_base import SharedFile, digests_of_pieces
from rollout.text_part import text_tensors
from rollout.types import (
    Manifest,
    Piece,
    Quantised,
    View,
)
from rollout.vllm.arguments import know_model
from rollout.vllm.text_view import TEXT, view_arguments

# Weights in 4 bits (quantization="bitsandbytes"): which bytes of a parameter are which matrix, and where its scales
# are.
#
# vLLM quantises each tensor of the checkpoint by itself, as the learner would, and puts the packed bytes of fused
# tensors one after the other. The parameter has attributes that say where each tensor begins (`bnb_shard_offsets`) and
# how it is dequantised (`bnb_quant_state`, bitsandbytes' QuantState). vLLM un-nests the scales while it loads: 0.5625
# bytes a weight.

_STATES, _OFFSETS = "bnb_quant_state", "bnb_shard_offsets"


def quantised_of(
    parameters: Mapping[str, Any], views: Mapping[str, View]
) -> tuple[dict[str, Quantised], dict[str, str]]:
    """Returns (the formats of matrices in 4 bits, the reasons why others cannot be mapped), by name in the checkpoint.

    parameters: vLLM's name of a parameter -> the parameter. Scales get the names that bitsandbytes uses in files.
    """
    found: dict[str, Quantised] = {}
    unknown: dict[str, str] = {}
    for name, view in views.items():
        if not hasattr(parameters[view.parameter], _STATES):
            continue
        state = state_of(parameters, view)
        if state is None:
            unknown[name] = f"vLLM multiplies it out together with other rows of {view.parameter}"
        elif state.quant_type != "nf4" or state.nested:
            unknown[name] = f"it is not nf4 with scales in float32 there, but {state.quant_type}, nested={state.nested}"
        else:
            found[name] = Quantised(tuple(state.shape), state.blocksize, f"{name}.absmax")
    return found, unknown


def state_of(parameters: Mapping[str, Any], view: View) -> Any:
    """The QuantState by which vLLM dequantises exactly these bytes of a parameter; None if there is none."""
    parameter = parameters[view.parameter]
    states, offsets = getattr(parameter, _STATES, {}), getattr(parameter, _OFFSETS, None)
    starts = [] if offsets is None else offsets.tolist()
    size = prod(view.shape)
    for shard, (start, end) in enumerate(pairwise(starts)):
        if (start, end) == (view.offset, view.offset + size) and set(view.strides) == {1}:
            return states[shard]
    return None


# ViewRecorder finds where an engine puts each tensor of a checkpoint by watching the engine load it, so that no table
# of architectures is needed.
#
# An engine fuses, splits and pads tensors while it loads, always by copies from a tensor of the checkpoint into a
# parameter. If all copies of a tensor follow one affine rule, the tensor is a strided view of the parameter; otherwise
# the tensor is refused, and the reason is kept.


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of elements of a tensor into a parameter.

    source, target: offset of the first copied element in the tensor and in the parameter. All values are in elements.
    """

    source: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]


@dataclass(slots=True)
class _Source:
    """A tensor of the checkpoint. copies: name of a parameter -> copies into it. spoilt: why it cannot be a view."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    spoilt: str = ""


class _Places:
    """Finds tensors by the memory that they lie in."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[int, int, str]]] = {}
        # While a weak reference to a storage lives, no other storage gets its number.
        self._alive: list[StorageWeakRef] = []

    def add(self, name: str, tensor: Tensor) -> None:
        storage, start = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.element_size()
        self._alive.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        self._found.setdefault(storage._cdata, []).append((start, start + tensor.nbytes, name))

    def find(self, tensor: Tensor) -> tuple[str, int] | None:
        """Returns (name of the tensor of which this one is a part, offset in elements); None if there is none."""
        at, size = int(tensor.storage_offset()) * tensor.element_size(), tensor.element_size()
        for start, end, name in self._found.get(tensor.untyped_storage()._cdata, ()):
            if start <= at < end:
                return name, (at - start) // size
        return None


class ViewRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records all copies from tensors that were given to `source` into the parameters."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets, self._places = _Places(), _Places()
        self._sources: dict[str, _Source] = {}
        self._written: dict[str, list[tuple[int, int, _Source]]] = {}  # parameter -> (first, past the last, by whom)
        for name, parameter in parameters:
            self._targets.add(name, parameter.detach())

    def source(self, name: str, tensor: Tensor) -> None:
        """Announces a tensor of the checkpoint that is about to be loaded."""
        self._places.add(name, tensor)
        self._sources[name] = _Source(name, tuple(tensor.shape), tensor.stride())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], Tensor):
            place = self._targets.find(args[0])
            if place is not None:
                self._note(func, *place, args)
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, parameter: str, offset: int, args: Sequence[Any]) -> None:
        target = args[0]
        first, last = offset, offset + _reach(target.shape, target.stride())
        found = self._places.find(args[1]) if func is torch.ops.aten.copy_.default else None
        by = self._sources[found[0]] if found else None
        for start, end, earlier in self._written.get(parameter, ()):
            if earlier is not by and start < last and first < end:
                earlier.spoilt = f"{parameter} was written over by {by.name if by else func.__name__}"
        if found is None or by is None:
            return
        self._written.setdefault(parameter, []).append((first, last, by))
        if args[1].shape != target.shape:
            by.spoilt = f"it was spread from {list(args[1].shape)} over {list(target.shape)}"
        strides = (args[1].stride(), offset, target.stride())
        by.copies.setdefault(parameter, []).append(Copy(found[1], tuple(target.shape), *strides))

    def views(self) -> tuple[dict[str, View], dict[str, str]]:
        """Returns (the view of each tensor, the reason why a tensor has none), by name."""
        found: dict[str, View] = {}
        refused: dict[str, str] = {}
        for name, source in self._sources.items():
            try:
                found[name] = _view_of(source)
            except ValueError as error:
                refused[name] = str(error)
        return found, refused


def _view_of(source: _Source) -> View:
    """The view of a tensor. Raises ValueError with the reason if there is none."""
    if source.spoilt:
        raise ValueError(source.spoilt)
    if not source.copies:
        raise ValueError("it is not copied into a parameter as it is")
    if len(source.copies) > 1:
        raise ValueError(f"its parts lie in {len(source.copies)} parameters, {', '.join(sorted(source.copies))}")
    ((parameter, copies),) = source.copies.items()
    offset, strides = affine(source.shape, source.strides, copies)
    return View(parameter, source.shape, strides, offset)


def affine(shape: tuple[int, ...], strides: tuple[int, ...], copies: Sequence[Copy]) -> tuple[int, tuple[int, ...]]:
    """Returns (offset, strides), in elements, at which these copies have put a tensor into the parameter.

    shape, strides: of the tensor. Raises ValueError if no offset and strides are right for every element.
    """
    copies = list({copy.source: copy for copy in copies}.values())  # a tensor may be loaded twice, in the same way
    if sum(_count(copy.shape) for copy in copies) != _count(shape):
        raise ValueError("not every element of it is copied, or some are in pieces that overlap")
    sizes = {stride: size for size, stride in zip(shape, strides, strict=True) if size > 1}
    moved: dict[int, int] = {}  # stride in the tensor -> stride in the parameter
    for copy in copies:
        first = _index(copy.source, sizes)
        for size, here, there in zip(copy.shape, copy.source_strides, copy.target_strides, strict=True):
            if size > 1 and first.get(here, 0) + size > sizes.get(here, 0):
                raise ValueError("its dimensions are joined or cut on the way")
            if size > 1 and moved.setdefault(here, there) != there:
                raise ValueError("its pieces are laid out differently")
    if moved.keys() != sizes.keys():
        raise ValueError("it is copied element by element, or row by row")
    starts = set()
    for copy in copies:
        index = _index(copy.source, sizes)
        starts.add(copy.target - sum(index[stride] * moved[stride] for stride in index))
    if len(starts) != 1:
        raise ValueError("its pieces are reordered")
    mapped = tuple(moved[stride] if size > 1 else 1 for size, stride in zip(shape, strides, strict=True))
    return starts.pop(), mapped


def _index(position: int, sizes: dict[int, int]) -> dict[int, int]:
    """Maps the stride of each dimension to the index along it of the element at a position of a tensor."""
    found = {}
    for stride in sorted(sizes, reverse=True):
        found[stride], position = divmod(position, stride)
    return found


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements lie from the first one to past the last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if _count(shape) else 0


# Where vLLM would put each tensor of a checkpoint, before any engine is started: vLLM's own loading code runs on a
# model and a checkpoint without weights (torch's meta device). Only names and shapes are read.


def views_of(path: str, dtype: str, stored: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, View], dict[str, str]]:
    """Returns (the view of each tensor, the reason why a tensor has none), by name; see ViewRecorder.views.

    stored: name of a tensor in the checkpoint -> its shape. To be called in a process of its own, since vLLM keeps the
    process groups that it makes.

    Raises what vLLM raises if it cannot load the model, if loading needs numbers, or if the device that vLLM was built
    for is missing.
    """
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model

    name, revision = split(path)
    know_model(name, revision)
    kind: Any = dtype  # vLLM's annotation is a list of literals
    args = EngineArgs(
        model=name, revision=revision, dtype=kind, trust_remote_code=False, enforce_eager=True,
        skip_tokenizer_init=True, **view_arguments(path, cuda=False, shards=1),
    )  # fmt: skip
    config = args.create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, "gloo")
        initialize_model_parallel()
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            with torch.device("meta"):
                model: Any = initialize_model(vllm_config=config)
        finally:
            torch.set_default_dtype(before)
        recorder = ViewRecorder(model.named_parameters())

        def checkpoint() -> Iterator[tuple[str, Tensor]]:
            for name, shape in stored.items():
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                recorder.source(name, tensor)
                yield name, tensor

        with recorder:
            model.load_weights(checkpoint())
    return recorder.views()


_ATTRIBUTE = "gleaner_shared_base"  # attribute of the model in which the loader leaves its Recorded


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the loader has recorded of the parameters and of NF4 scales, right after the checkpoint was loaded.

    files: name of a piece -> the file in which it lies, on a CPU. addresses, digests: of the pieces, by name. views,
    refused, quantised, owner: see Manifest.
    """

    files: dict[str, SharedFile]
    addresses: dict[str, int]
    digests: dict[str, str]
    views: dict[str, View]
    refused: dict[str, str]
    quantised: dict[str, Quantised]
    owner: str


class _Recording(BaseModelLoader):
    """A base class to be combined with one of vLLM's loaders: watches it, and leaves a Recorded at the model."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        parameters: dict[str, Any] = dict(model.named_parameters())  # tied parameters are listed once
        on_cpu = all(parameter.device.type == "cpu" for parameter in parameters.values())
        files = _in_a_file(parameters) if on_cpu else {}
        recorder = ViewRecorder(parameters.items())
        with recorder, _watched(model, recorder):
            super().load_weights(model, model_config)  # type: ignore[safe-super]
        views, refused = recorder.views()
        quantised, unknown = quantised_of(parameters, views)
        states = {one.scales: state_of(parameters, views[name]) for name, one in quantised.items()}
        if on_cpu and states:
            files |= _scales_in_a_file(states)
        held = {name: parameter.data for name, parameter in parameters.items()}
        held |= {name: state.absmax for name, state in states.items()}
        views = {name: view for name, view in views.items() if name not in unknown}
        addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
        found = Recorded(
            files, addresses, digests_of_pieces(held), views, refused | unknown, quantised, uuid.uuid4().hex
        )
        setattr(model, _ATTRIBUTE, found)


@contextmanager
def recorded(load_format: str) -> Iterator[None]:
    """A context in which an engine that loads in this format leaves a Recorded at its model. On a CPU the engine also
    computes with its weights as they are (plain_linear_layers).

    vLLM's loader of the format is replaced. A load format with a name of its own would not do: with
    quantization="bitsandbytes" vLLM takes the format of that name, whatever was asked for.
    """
    plain = type(get_model_loader(LoadConfig(load_format=load_format)))
    register_model_loader(load_format)(type(plain.__name__, (_Recording, plain), {}))
    try:
        with plain_linear_layers():
            yield
    finally:
        register_model_loader(load_format)(plain)


@contextmanager
def _watched(model: Any, recorder: ViewRecorder) -> Iterator[None]:
    """A context in which the recorder is told of each tensor that the model is given to load."""
    load = model.load_weights

    def noting(weights: Iterable[tuple[str, Tensor]]) -> Any:
        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in text_tensors(weights) if getattr(model, TEXT, False) else weights:
                recorder.source(name, tensor)
                yield name, tensor

        return load(noted())

    model.load_weights = noting
    try:
        yield
    finally:
        del model.load_weights


def _in_a_file(parameters: dict[str, Any]) -> dict[str, SharedFile]:
    """Moves the parameters into a file, before they have any content."""
    file = SharedFile(parameter.data for parameter in parameters.values())
    for parameter in parameters.values():
        parameter.data = file.place(parameter.data)
    return dict.fromkeys(parameters, file)


def _scales_in_a_file(states: dict[str, Any]) -> dict[str, SharedFile]:
    """Moves the scales into another file, after loading, since vLLM makes them while it loads."""
    file = SharedFile(state.absmax for state in states.values())
    for state in states.values():
        state.absmax = file.place(state.absmax).copy_(state.absmax)
    return dict.fromkeys(states, file)


@contextmanager
def plain_linear_layers() -> Iterator[None]:
    """A context in which models are built that compute on a CPU with their weights as they are.

    vLLM's own kernels for a CPU (oneDNN, AMX) keep a repacked copy instead, which no other process could use. They are
    faster: a shared base on a CPU saves memory and costs time.
    """
    before = layer_utils.dispatch_cpu_unquantized_gemm

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = plain
    try:
        yield
    finally:
        layer_utils.dispatch_cpu_unquantized_gemm = before


def manifest_of(engine: Any) -> Manifest:
    """The Manifest, with fresh handles, of a running LLMEngine that was built within `recorded`. To be called by the
    engine's own thread.

    A parameter that vLLM has moved or changed since it was loaded is left out, and the tensors in it are refused.
    """
    # The worker is in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so a function can be passed.
    found: list[Manifest] = engine.collective_rpc(_manifest)
    return found[0]


def _manifest(worker: Any) -> Manifest:
    model = worker.model_runner.get_model()
    recorded: Recorded = getattr(model, _ATTRIBUTE)
    held = _held(model, recorded)
    digests = digests_of_pieces({name: held[name] for name in recorded.digests if name in held})
    spoilt = {name: reason for name in recorded.digests if (reason := _spoilt(name, recorded, held, digests))}
    pieces = {name: held[name] for name in recorded.digests if name not in spoilt}
    if recorded.files:
        handles = {name: recorded.files[name].handle(tensor) for name, tensor in pieces.items()}
        where = machine.name()
    else:
        handles, where = shared_base.handles_of(pieces), shared_base.card_of(worker.device)
    refused = dict(recorded.refused)
    for name, view in recorded.views.items():
        needed = [view.parameter] + ([recorded.quantised[name].scales] if name in recorded.quantised else [])
        if reasons := [spoilt[piece] for piece in needed if piece in spoilt]:
            refused[name] = reasons[0]
    return Manifest(
        "shared_file" if recorded.files else "cuda_ipc",
        where,
        recorded.owner,
        {name: _piece(tensor, digests[name], handles[name]) for name, tensor in pieces.items()},
        {name: view for name, view in recorded.views.items() if name not in refused},
        refused,
        {name: one for name, one in recorded.quantised.items() if name not in refused},
    )


def _held(model: Any, recorded: Recorded) -> dict[str, Tensor]:
    """The tensors with which the model computes now, by the names of the pieces."""
    # LoRA wraps layers, so that their parameters are one module further down.
    parameters = {name.replace(".base_layer.", "."): parameter for name, parameter in model.named_parameters()}
    held: dict[str, Tensor] = {name: parameter.data for name, parameter in parameters.items()}
    states = {one.scales: state_of(parameters, recorded.views[name]) for name, one in recorded.quantised.items()}
    return held | {name: state.absmax for name, state in states.items() if state is not None}


def _spoilt(name: str, recorded: Recorded, held: dict[str, Tensor], digests: dict[str, str]) -> str:
    """Why another process cannot use a piece as it was loaded; "" if it can."""
    if name not in held or held[name].data_ptr() != recorded.addresses[name]:
        return f"vLLM has moved or repacked {name} since it was loaded"
    if digests[name] != recorded.digests[name]:
        return f"vLLM has changed {name} since it was loaded"
    return "" if held[name].is_contiguous() else f"{name} has gaps, strides {held[name].stride()}"


def _piece(tensor: Tensor, digest: str, handle: bytes) -> Piece:
    return Piece(str(tensor.dtype).removeprefix("torch."), tensor.numel(), digest, handle)
