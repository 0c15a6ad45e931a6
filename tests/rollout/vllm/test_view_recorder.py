"""What is noted of a load: views that are the checkpoint's tensors bit for bit, and reasons where there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rollout.shared_base import SharedFile
from rollout.types import View
from rollout.vllm.shared_base import ViewRecorder

Tensors = dict[str, Tensor]


def recorded(
    sizes: dict[str, tuple[int, ...]], sources: Tensors, load: Callable[[Tensors, Tensors], None]
) -> tuple[Tensors, dict[str, View], dict[str, str]]:
    """Parameters in one piece of memory, as on a CPU, after a load; views, and why there are no more."""
    empty = [torch.empty(size, dtype=torch.bfloat16) for size in sizes.values()]
    file = SharedFile(empty)
    parameters = {name: file.place(tensor) for name, tensor in zip(sizes, empty, strict=True)}
    recorder = ViewRecorder(parameters.items())
    with recorder:
        for name, tensor in sources.items():
            recorder.source(name, tensor)
        load(parameters, sources)
    return parameters, *recorder.views()


def read(parameters: Tensors, view: View) -> Tensor:
    piece = parameters[view.parameter]
    return piece.as_strided(view.shape, view.strides, piece.storage_offset() + view.offset)


def fused_and_padded(to: Tensors, of: Tensors) -> None:
    to["qkv"][:8].copy_(of["q"])
    to["qkv"][8:10].copy_(of["k"])
    to["qkv"].narrow(0, 10, 2).copy_(of["v"])
    to["embedding"][:50].copy_(of["words"])
    to["embedding"][50:].fill_(0)
    to["turned"].copy_(of["turned"].t())
    for half in (slice(0, 3), slice(3, 8)):
        to["halves"][:, half].copy_(of["halves"][:, half])
    to["norm"].copy_(of["norm"])
    to["norm"].copy_(of["norm"])  # once more
    to["one"].copy_(of["scalar"].view(1))


def test_fused_padded_turned_and_rounded_tensors_are_read_back_bit_for_bit() -> None:
    shapes = {"q": (8, 6), "k": (2, 6), "v": (2, 6), "words": (50, 4), "turned": (5, 3), "halves": (4, 8), "norm": (9,)}
    # Some of one file, as a reader of safetensors may give them.
    file = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    parts = file.split([torch.Size(shape).numel() for shape in shapes.values()] + [1000 - sum(
        torch.Size(shape).numel() for shape in shapes.values())])  # fmt: skip
    sources = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=False)}
    sources["scalar"] = torch.tensor(0.1)
    sizes = {"qkv": (12, 6), "embedding": (64, 4), "turned": (3, 5), "halves": (4, 8), "norm": (9,), "one": (1,)}
    parameters, views, refused = recorded(sizes, sources, fused_and_padded)
    assert refused == {}
    for name, source in sources.items():
        assert torch.equal(read(parameters, views[name]), source.bfloat16()), name


def reordered(to: Tensors, of: Tensors) -> None:
    heads = of["a"].view(4, 2, 6)
    to["p"].copy_(torch.cat([heads[:, 0], heads[:, 1]]))


def by_pieces(to: Tensors, of: Tensors) -> None:
    for row in (0, 2, 4, 6):
        to["p"][row : row + 2].copy_(of["a"][6 - row : 8 - row])


def in_part(to: Tensors, of: Tensors) -> None:
    to["p"][:7].copy_(of["a"][:7])


def in_two_places(to: Tensors, of: Tensors) -> None:
    to["p"][:4].copy_(of["a"][:4])
    to["other"][:4].copy_(of["a"][4:])


def joined(to: Tensors, of: Tensors) -> None:
    to["p"].view(48).copy_(of["a"].flatten())


def changed_before(to: Tensors, of: Tensors) -> None:
    to["p"].copy_(of["a"] + 1)


def changed_after(to: Tensors, of: Tensors) -> None:
    to["p"].copy_(of["a"])
    to["p"][2:3].mul_(2)


def written_over(to: Tensors, of: Tensors) -> None:
    to["p"].copy_(of["a"])
    to["p"][5:].copy_(of["b"])


def spread(to: Tensors, of: Tensors) -> None:
    to["other"].copy_(of["b"][:1])


@pytest.mark.parametrize(
    ("load", "name", "reason"),
    [
        (reordered, "a", "not copied into a parameter as it is"),
        (by_pieces, "a", "its pieces are reordered"),
        (in_part, "a", "not every element of it is copied"),
        (in_two_places, "a", "its parts lie in 2 parameters, other, p"),
        (joined, "a", "its dimensions are joined"),
        (changed_before, "a", "not copied into a parameter as it is"),
        (changed_after, "a", "p was written over by mul_"),
        (written_over, "a", "p was written over by b"),
        (spread, "b", r"spread from \[1, 6\] over \[8, 6\]"),
    ],
)
def test_what_is_no_view_is_refused_with_the_reason(
    load: Callable[[Tensors, Tensors], None], name: str, reason: str
) -> None:
    sources = {"a": torch.randn(8, 6), "b": torch.randn(3, 6)}
    _, views, refused = recorded({"p": (8, 6), "other": (8, 6)}, sources, load)
    assert name not in views
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refused[name])


def test_memory_that_is_used_again_is_not_taken_for_the_tensor_that_was_there() -> None:
    parameters = {"p": torch.empty(4096), "other": torch.empty(4096)}
    recorder = ViewRecorder(parameters.items())
    with recorder:
        source = torch.randn(4096)
        recorder.source("a", source)
        parameters["p"].copy_(source)
        del source
        for _ in range(50):  # of which some get the storage that has just been given back
            parameters["other"].copy_(torch.randn(4096))
    assert recorder.views() == ({"a": View("p", (4096,), (1,), 0)}, {})
