"""Weights as safetensors bytes, one tensor at a time: what travels from the learner to a generator.

safetensors' own save and load hold everything two or three times over. Whole weights are gigabytes, so here each tensor
is written where it will lie among the bytes, and a reader copies one out of them at a time. Format: 8 bytes of length,
little endian; a JSON object of that length, name -> dtype, shape and place in what follows; the tensors, without gaps.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Source(NamedTuple):
    """A tensor that is written into one of its shape, on the CPU, when its turn comes."""

    shape: Sequence[int]
    write: Callable[[Tensor], object]

    @classmethod
    def of(cls, tensor: Tensor) -> "Source":
        """A source for a tensor that exists already."""
        return cls(tensor.shape, lambda place: place.copy_(tensor))


@torch.no_grad()
def pack(sources: Mapping[str, Source], dtype: torch.dtype) -> memoryview:
    """Every tensor, in `dtype`."""
    header: dict[str, Any] = {}
    end = 0
    for name, source in sources.items():
        start, end = end, end + dtype.itemsize * torch.Size(source.shape).numel()
        header[name] = {"dtype": _NAMES[dtype], "shape": list(source.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    begin = 8 + len(text)
    payload = torch.empty(begin + end, dtype=torch.uint8)
    view = payload.numpy().data
    view[:begin] = struct.pack("<Q", len(text)) + text
    for name, source in sources.items():
        start, end = header[name]["data_offsets"]
        source.write(payload[begin + start : begin + end].view(dtype).view(source.shape))
    return view


def header_of(payload: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """Name -> dtype, shape and data_offsets, and where the tensors begin.

    Raises struct.error, ValueError or AttributeError for bytes that are no safetensors.
    """
    (length,) = struct.unpack_from("<Q", payload)
    header: dict[str, Any] = json.loads(bytes(payload[8 : 8 + length]))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length


def unpack(payload: bytes | memoryview) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, each in memory of its own."""
    header, begin = header_of(payload)
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        own = bytearray(memoryview(payload)[begin + start : begin + end])
        yield name, torch.frombuffer(own, dtype=_DTYPES[entry["dtype"]]).reshape(entry["shape"])
