"""Our safetensors writer and reader against the library's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save

from rollout.weights import (
    Source,
    pack,
    unpack,
    write,
)

names = st.text(min_size=1).filter(lambda name: name != "__metadata__")  # which is the format's own
shapes = st.dictionaries(names, st.lists(st.integers(1, 5), max_size=3), max_size=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(shapes=shapes)
def test_it_is_the_format_in_both_directions(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, shapes: dict[str, list[int]]
) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    wanted = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    sources = {name: Source.of(tensor) for name, tensor in tensors.items()}
    payload, file = pack(sources, dtype), tmp_path_factory.getbasetemp() / "written.safetensors"
    write(file, sources, dtype)
    for found in (
        load(bytes(payload)), dict(unpack(payload)), dict(unpack(save(wanted, metadata={"format": "pt"}))),
        load_file(file), dict(unpack(file.read_bytes())),
    ):  # fmt: skip
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert all(tensor.dtype == dtype for tensor in found.values())
