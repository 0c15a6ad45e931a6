"""What a generator tells the learner of its base: where each tensor of the checkpoint lies, and how to map the memory.

The driver carries it from one process to the other, hence no torch here. How memory is mapped is a transport's affair:
rollout.shared_base on a card, rollout.shared_base on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transport = Literal["cuda_ipc", "shared_file"]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of the checkpoint as elements of one of the engine's parameters.

    Its element [i, j, ...] is element offset + i * strides[0] + j * strides[1] + ... of the parameter.
    """

    parameter: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix of the checkpoint that the engine holds in NF4 (model.base: nf4).

    Its view is the packed weights, two a byte: [elements / 2, 1] of uint8, without gaps. The scales of its blocks are a
    piece, [elements / block] of float32.

    Attributes:
        shape: of the matrix, [out, in].
        block: elements, in the order of its rows, that one scale belongs to.
        scales: the name of their piece.
    """

    shape: tuple[int, ...]
    block: int
    scales: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The memory of one of the engine's parameters, or of scales: [elements] of a torch type, without gaps.

    digest: of its content (rollout.shared_base). handle: what its transport maps it by.
    """

    dtype: str
    elements: int
    digest: str
    handle: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """A base model that may be mapped.

    Attributes:
        transport: how; it decides what the handles are.
        device: the card's UUID, or the machine; both processes must see the same.
        owner: the generator's process; no two have the same.
        pieces: by the engine's name of the parameter; of scales, by Quantised.scales.
        views: by the checkpoint's name of the tensor.
        refused: tensors of the checkpoint that are no view, and why.
        quantised: by the checkpoint's name, which of the views are in 4 bits; {} with a base in 16 or 32.
    """

    transport: Transport
    device: str
    owner: str
    pieces: dict[str, Piece]
    views: dict[str, View]
    refused: dict[str, str]
    quantised: dict[str, Quantised]


class BaseNotShared(ValueError):
    """The base cannot be shared, or is not what it was; the message names the tensor and the setting."""
