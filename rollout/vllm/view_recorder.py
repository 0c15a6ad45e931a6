"""Where an engine puts each tensor of a checkpoint, found by watching it load: no table of architectures is needed.

An engine fuses, splits and pads as it loads, always by copies from a tensor of the checkpoint into a parameter. If all
copies of a tensor follow one affine rule, the tensor can be read back as a strided view of the parameter; else it is
refused, and the reason kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.shared_base.manifest import View


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of elements of a tensor into a parameter: both in elements from the first one's, strides alike."""

    source: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target: int
    target_strides: tuple[int, ...]


@dataclass(slots=True)
class _Source:
    """A tensor of the checkpoint. copies: by the name of the parameter; spoilt: what was done to it afterwards."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    copies: dict[str, list[Copy]] = field(default_factory=dict)
    spoilt: str = ""


class _Places:
    """Tensors by the memory that they lie in."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[int, int, str]]] = {}
        # As long as such a reference lives, no other storage has the same number.
        self._alive: list[StorageWeakRef] = []

    def add(self, name: str, tensor: Tensor) -> None:
        storage, start = tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.element_size()
        self._alive.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        self._found.setdefault(storage._cdata, []).append((start, start + tensor.nbytes, name))

    def find(self, tensor: Tensor) -> tuple[str, int] | None:
        """(name of the tensor that it is a part of, offset in elements from that tensor's first)."""
        at, size = int(tensor.storage_offset()) * tensor.element_size(), tensor.element_size()
        for start, end, name in self._found.get(tensor.untyped_storage()._cdata, ()):
            if start <= at < end:
                return name, (at - start) // size
        return None


class ViewRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside of it, what is copied from the tensors given to `source` into the parameters is noted."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._targets, self._places = _Places(), _Places()
        self._sources: dict[str, _Source] = {}
        self._written: dict[str, list[tuple[int, int, _Source]]] = {}  # parameter -> (first, past the last, by whom)
        for name, parameter in parameters:
            self._targets.add(name, parameter.detach())

    def source(self, name: str, tensor: Tensor) -> None:
        """A tensor of the checkpoint that is about to be loaded."""
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
        """(view of each tensor by its name, why the others have none)."""
        found: dict[str, View] = {}
        refused: dict[str, str] = {}
        for name, source in self._sources.items():
            try:
                found[name] = _view_of(source)
            except ValueError as error:
                refused[name] = str(error)
        return found, refused


def _view_of(source: _Source) -> View:
    """Raises ValueError with the reason if there is none."""
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
    """(offset, strides) in the parameter, in elements, of a tensor that these copies have put there.

    Raises ValueError if no such rule holds for every element of the tensor.
    """
    copies = list({copy.source: copy for copy in copies}.values())  # loaded once more: the same again
    if sum(_count(copy.shape) for copy in copies) != _count(shape):
        raise ValueError("not every element of it is copied, or some are in pieces that overlap")
    sizes = {stride: size for size, stride in zip(shape, strides, strict=True) if size > 1}
    moved: dict[int, int] = {}  # a stride of the tensor -> of the parameter
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
    """Stride of a dimension -> the index along it of the element at this position of a tensor."""
    found = {}
    for stride in sorted(sizes, reverse=True):
        found[stride], position = divmod(position, stride)
    return found


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to past the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if _count(shape) else 0
