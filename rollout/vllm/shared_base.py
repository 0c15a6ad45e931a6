"""The base of an engine as one that the learner may map: a loader that records where each tensor goes, and the manifest
of the loaded model (memory.base: shared). On a CPU the parameters lie in files that others can map.

The names of vLLM that are used here are the same from 0.27 to 0.33.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import LoadConfig
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from cluster import machine
from rollout.shared_base import cuda_ipc
from rollout.shared_base.checksum import digests_of_pieces
from rollout.shared_base.manifest import Manifest, Piece, Quantised, View
from rollout.shared_base.shared_file import SharedFile
from rollout.vllm.quant_states import quantised_of, state_of
from rollout.vllm.view_recorder import ViewRecorder

_ATTRIBUTE = "gleaner_shared_base"  # of the model: where the loader leaves what it has recorded


@dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of the parameters, and of the scales of those in 4 bits, once the checkpoint is in them.

    files: that each lies in, on a CPU. addresses and digests: by the name of the piece.
    """

    files: dict[str, SharedFile]
    addresses: dict[str, int]
    digests: dict[str, str]
    views: dict[str, View]
    refused: dict[str, str]
    quantised: dict[str, Quantised]
    owner: str


class _Recording(BaseModelLoader):
    """What is put before a loader of vLLM's: it watches it."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        parameters: dict[str, Any] = dict(model.named_parameters())  # one that is tied to another once
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
    """Inside of it an engine that loads in this format leaves a manifest behind, and on a CPU computes with its weights
    as they are.

    A format of our own would not do: with quantization="bitsandbytes" vLLM takes the format of that name, whatever was
    asked for.
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
    """Inside of it the recorder is told of each tensor that the model is given to load."""
    load = model.load_weights

    def noting(weights: Iterable[tuple[str, Tensor]]) -> Any:
        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                recorder.source(name, tensor)
                yield name, tensor

        return load(noted())

    model.load_weights = noting
    try:
        yield
    finally:
        del model.load_weights


def _in_a_file(parameters: dict[str, Any]) -> dict[str, SharedFile]:
    """Moves the parameters, which have no content yet, into a file."""
    file = SharedFile(parameter.data for parameter in parameters.values())
    for parameter in parameters.values():
        parameter.data = file.place(parameter.data)
    return dict.fromkeys(parameters, file)


def _scales_in_a_file(states: dict[str, Any]) -> dict[str, SharedFile]:
    """Moves the scales into another one: what vLLM multiplies with is made as it loads."""
    file = SharedFile(state.absmax for state in states.values())
    for state in states.values():
        state.absmax = file.place(state.absmax).copy_(state.absmax)
    return dict.fromkeys(states, file)


@contextmanager
def plain_linear_layers() -> Iterator[None]:
    """A model that is built inside of it computes on a CPU with its weights as they are.

    vLLM's own kernels for a CPU (oneDNN, AMX) keep a repacked copy instead, which no other process could use. They are
    faster, so a shared base on a CPU shows that it works, and saves memory, not time.
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
    """Of a running LLMEngine that was built inside of `recorded`; handles are made anew. For the engine's own thread.

    A parameter that vLLM has moved or changed since it was loaded is left out, and the tensors in it are refused.
    """
    # In this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so a function may be passed as it is.
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
        handles, where = cuda_ipc.handles_of(pieces), cuda_ipc.card(worker.device)
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
    """What the model computes with now, by the name of the piece."""
    # LoRA wraps layers: their parameters stay, one module further down.
    parameters = {name.replace(".base_layer.", "."): parameter for name, parameter in model.named_parameters()}
    held: dict[str, Tensor] = {name: parameter.data for name, parameter in parameters.items()}
    states = {one.scales: state_of(parameters, recorded.views[name]) for name, one in recorded.quantised.items()}
    return held | {name: state.absmax for name, state in states.items() if state is not None}


def _spoilt(name: str, recorded: Recorded, held: dict[str, Tensor], digests: dict[str, str]) -> str:
    """Why nobody else can use a parameter as it was loaded; '' if all can."""
    if name not in held or held[name].data_ptr() != recorded.addresses[name]:
        return f"vLLM has moved or repacked {name} since it was loaded"
    if digests[name] != recorded.digests[name]:
        return f"vLLM has changed {name} since it was loaded"
    return "" if held[name].is_contiguous() else f"{name} has gaps, strides {held[name].stride()}"


def _piece(tensor: Tensor, digest: str, handle: bytes) -> Piece:
    return Piece(str(tensor.dtype).removeprefix("torch."), tensor.numel(), digest, handle)
