"""The base of an engine as one that the learner may map: a load format that records where each tensor goes, and the
manifest of the loaded model (memory.base: shared). On a CPU the parameters lie in a file that others can map.

The names of vLLM that are used here are the same from 0.27 to 0.33.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from rollout.shared_base import cuda_ipc, shared_file
from rollout.shared_base.checksum import digests_of_pieces
from rollout.shared_base.manifest import Manifest, Piece, View
from rollout.shared_base.shared_file import SharedFile
from rollout.vllm.arguments import SHARED

_LEFT = "gleaner_shared_base"  # the attribute of the model in which the load format leaves what it has recorded


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """What is known of the parameters once the checkpoint is in them.

    file: that they lie in, on a CPU. addresses and digests: by the name of the parameter.
    """

    file: SharedFile | None
    addresses: dict[str, int]
    digests: dict[str, str]
    views: dict[str, View]
    refused: dict[str, str]
    owner: str


@register_model_loader(SHARED)
class RecordingLoader(DefaultModelLoader):
    """vLLM's own loader, watched."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: Any, model: Any) -> Any:
        for name, tensor in super().get_all_weights(model_config, model):
            self._recorder.source(name, tensor)
            yield name, tensor

    def load_weights(self, model: Any, model_config: Any) -> None:
        from rollout.vllm.view_recorder import ViewRecorder

        parameters: dict[str, Any] = dict(model.named_parameters())  # one that is tied to another once
        file = _in_a_file(parameters) if _on_cpu(parameters) else None
        self._recorder = ViewRecorder(parameters.items())
        with self._recorder:
            super().load_weights(model, model_config)
        views, refused = self._recorder.views()
        held = {name: parameter.data for name, parameter in parameters.items()}
        addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
        found = Recorded(file, addresses, digests_of_pieces(held), views, refused, uuid.uuid4().hex)
        setattr(model, _LEFT, found)


def _on_cpu(parameters: dict[str, Any]) -> bool:
    return all(parameter.device.type == "cpu" for parameter in parameters.values())


def _in_a_file(parameters: dict[str, Any]) -> SharedFile:
    """Moves the parameters, which have no content yet, into a file."""
    file = SharedFile(parameter.data for parameter in parameters.values())
    for parameter in parameters.values():
        parameter.data = file.place(parameter.data)
    return file


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
    """Of a running LLMEngine that was built with this load format; handles are made anew. For the engine's own thread.

    A parameter that vLLM has moved or changed since it was loaded is left out, and the tensors in it are refused.
    """
    # In this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so a function may be passed as it is.
    found: list[Manifest] = engine.collective_rpc(_manifest)
    return found[0]


def _manifest(worker: Any) -> Manifest:
    model = worker.model_runner.get_model()
    recorded: Recorded = getattr(model, _LEFT)
    # LoRA wraps layers: their parameters stay, one module further down.
    held: dict[str, Tensor] = {
        name.replace(".base_layer.", "."): parameter.data for name, parameter in model.named_parameters()
    }
    digests = digests_of_pieces({name: held[name] for name in recorded.digests if name in held})
    spoilt = {name: reason for name in recorded.digests if (reason := _spoilt(name, recorded, held, digests))}
    pieces = {name: held[name] for name in recorded.digests if name not in spoilt}
    if recorded.file is None:
        handles, where = cuda_ipc.handles_of(pieces), cuda_ipc.card(worker.device)
    else:
        handles = {name: recorded.file.handle(tensor) for name, tensor in pieces.items()}
        where = shared_file.machine()
    return Manifest(
        "cuda_ipc" if recorded.file is None else "shared_file",
        where,
        recorded.owner,
        {name: _piece(tensor, digests[name], handles[name]) for name, tensor in pieces.items()},
        {name: view for name, view in recorded.views.items() if view.parameter not in spoilt},
        recorded.refused
        | {name: spoilt[view.parameter] for name, view in recorded.views.items() if view.parameter in spoilt},
    )


def _spoilt(name: str, recorded: Recorded, held: dict[str, Tensor], digests: dict[str, str]) -> str:
    """Why nobody else can use a parameter as it was loaded; '' if all can."""
    if name not in held or held[name].data_ptr() != recorded.addresses[name]:
        return f"vLLM has moved or repacked {name} since it was loaded"
    if digests[name] != recorded.digests[name]:
        return f"vLLM has changed {name} since it was loaded"
    return "" if held[name].is_contiguous() else f"{name} has gaps, strides {held[name].stride()}"


def _piece(tensor: Tensor, digest: str, handle: bytes) -> Piece:
    return Piece(str(tensor.dtype).removeprefix("torch."), tensor.numel(), digest, handle)
