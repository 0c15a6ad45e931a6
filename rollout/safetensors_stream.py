"""Weights as safetensors bytes, one tensor at a time: what travels from the learner to a generator, and whole models in
files.

safetensors' own save and load hold everything two or three times over. Whole weights are gigabytes, so here each tensor
is written where it will lie among the bytes, and a reader finds it there. Format: 8 bytes of length, little endian; a
JSON object of that length, name -> dtype, shape and place in what follows; the tensors, without gaps.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout.raw_bytes import as_bytes

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Source(NamedTuple):
    """A tensor that is written into one of its shape when its turn comes."""

    shape: Sequence[int]
    write: Callable[[Tensor], object]

    @classmethod
    def of(cls, tensor: Tensor) -> "Source":
        """A source for a tensor that exists already."""
        return cls(tensor.shape, lambda place: place.copy_(tensor))


def _fresh_bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


@torch.no_grad()
def pack(sources: Mapping[str, Source], dtype: torch.dtype, room: Callable[[int], Tensor] = _fresh_bytes) -> memoryview:
    """Every tensor, in `dtype`. room: bytes -> where they are written, uint8."""
    header, places = _laid_out(sources, dtype)
    begin = len(header)
    payload = room(begin + max((end for _, end in places.values()), default=0))
    view = payload.numpy().data
    view[:begin] = header
    for name, source in sources.items():
        start, end = places[name]
        source.write(payload[begin + start : begin + end].view(dtype).view(source.shape))
    return view


@torch.no_grad()
def write(file: Path, sources: Mapping[str, Source], dtype: torch.dtype) -> None:
    """The same as a file, of which no more than one tensor is in memory. transformers loads it."""
    header, _ = _laid_out(sources, dtype, {"__metadata__": {"format": "pt"}})
    with file.open("wb") as out:
        out.write(header)
        for source in sources.values():
            place = torch.empty(source.shape, dtype=dtype)
            source.write(place)
            out.write(place.reshape(-1).view(torch.uint8).numpy().data)


def _laid_out(
    sources: Mapping[str, Source], dtype: torch.dtype, beside: Mapping[str, Any] | None = None
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """What comes before the tensors, and where each begins and ends behind it."""
    entries: dict[str, Any] = dict(beside or {})
    places: dict[str, tuple[int, int]] = {}
    end = 0
    for name, source in sources.items():
        start, end = end, end + dtype.itemsize * torch.Size(source.shape).numel()
        places[name] = start, end
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(source.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    return struct.pack("<Q", len(text)) + text, places


def header_of(payload: bytes | memoryview) -> tuple[dict[str, Any], int]:
    """Name -> dtype, shape and data_offsets, and where the tensors begin.

    Raises struct.error, ValueError or AttributeError for bytes that are no safetensors.
    """
    (length,) = struct.unpack_from("<Q", payload)
    header: dict[str, Any] = json.loads(bytes(payload[8 : 8 + length]))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length


def unpack(payload: bytes | memoryview) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor, each on the payload's own memory: to be read and never written to, since others read it, too,
    and it may be mapped for reading alone. A copy would cost a second for each gigabyte, nearly all for fresh pages."""
    header, begin = header_of(payload)
    whole = as_bytes(payload)
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        yield name, whole[begin + start : begin + end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
