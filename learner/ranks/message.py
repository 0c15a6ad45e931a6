"""What ranks send each other, as bytes: JSON for plain values, and the contents of tensors behind it.

Not torch's gathering of objects, which are pickled: a port has no password, and a pickle is a program.
"""

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

TENSOR = "tensor"  # the key of what stands for one: its type, its shape, and where its content begins
LENGTH = 8  # bytes that say how long the JSON is


def packed(value: Any) -> bytes:
    """Of lists, tuples, dictionaries by name, numbers, text and tensors on any device."""
    contents = bytearray()

    def plain(one: Any) -> Any:
        if not isinstance(one, Tensor):
            raise TypeError(f"a rank sends no {type(one).__name__}")
        array = one.detach().cpu().numpy()
        begins = len(contents)
        contents.extend(array.tobytes())
        return {TENSOR: (array.dtype.str, array.shape, begins)}

    text = json.dumps(value, default=plain).encode()
    return len(text).to_bytes(LENGTH, "little") + text + contents


def unpacked(message: bytes) -> Any:
    """The same, with lists for tuples, and tensors in main memory."""
    begins = LENGTH + int.from_bytes(message[:LENGTH], "little")
    contents = message[begins:]

    def tensor(found: dict[str, Any]) -> Any:
        if found.keys() != {TENSOR}:
            return found
        kind, shape, start = found[TENSOR]
        count = int(np.prod(shape, dtype=np.int64))
        return torch.from_numpy(np.frombuffer(contents, kind, count, start).reshape(shape).copy())

    return json.loads(message[LENGTH:begins], object_hook=tensor)
