"""What a rank keeps so that a step can be taken again: all that it depends on, as it was when the step began.

Ranks that are left after the loss of one may be anywhere in the step, one before its update and another behind it. With
this they all go back to where they were equal, and give it to the process that takes the place of the lost one.
"""

import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Before(NamedTuple):
    """number: of the step, as the driver counts. state: of tensors in main memory and plain values."""

    number: int
    state: dict[str, Any]


def copied(value: Any) -> Any:
    """The same with copies of its tensors, in main memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: copied(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value))
    return value


def as_bytes(state: dict[str, Any]) -> bytes:
    """Of tensors and plain values."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def from_bytes(sent: bytes) -> dict[str, Any]:
    """What as_bytes made. No pickle of other things is read: a port has no password."""
    state: dict[str, Any] = torch.load(io.BytesIO(sent), weights_only=True)
    return state
