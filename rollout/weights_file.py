"""Whole weights on their way within one machine: a file in the learner's memory, which generators map.

In Ray's object store they would be a further copy, in shared memory, of which a container has 64 MiB unless it is given
more. The file takes none of that (memfd_create). It has two places, and each policy takes that of the policy before the
last: its pages are there, where fresh ones would cost more than the copy, and in a process on a card they stay
registered with CUDA, which copies from them several times as fast.

The place of v is written again for v + 2, when every generator that the driver waits for has v, and v + 1 is published.
One that is being brought back is not waited for and may still read v: it looks at the version before it loads and
afterwards, and there is none while the learner writes (a sequence lock).
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cluster import machine
from cluster.actor import ValueLost
from rollout.raw_bytes import as_bytes
from rollout.safetensors_stream import Source, pack
from rollout.types import AdapterCorrupt, EngineError, Weights, WeightsInFile, digest_of_weights

log = logging.getLogger("rollout")

_BEFORE = 64  # bytes before the weights: the version, and room so that tensors are aligned
_WRITING = -1


class WeightsFile:
    """The learner's end. places: policies that there is room for, 1 or 2."""

    def __init__(self, places: int = 2) -> None:
        self._places = places
        self._descriptor, self._capacity = -1, 0
        self._offset = 0  # of the newest policy's place
        self._mapping: _Mapping | None = None

    def pack(self, version: int, sources: Mapping[str, Source], dtype: torch.dtype) -> WeightsInFile:
        """Writes the weights in the place of those before the last, as rollout.safetensors_stream.pack does."""
        payload = pack(sources, dtype, self._room)
        return self._written(version, digest_of_weights(payload), len(payload))

    def copy(self, weights: Weights) -> WeightsInFile:
        """Writes weights that came another way, in the same place."""
        size = len(weights.payload)
        self._room(size).numpy().data[:] = weights.payload
        return self._written(weights.version, weights.digest, size)

    def _written(self, version: int, digest: str, size: int) -> WeightsInFile:
        mapping = self._mapped()
        mapping.stamp(self._offset, version)
        if not mapping.kept:
            self._mapping = None
        path, inode = _path_of(self._descriptor), os.fstat(self._descriptor).st_ino
        return WeightsInFile(version, digest, machine.name(), path, inode, self._offset, size)

    def _room(self, size: int) -> Tensor:
        """[size] uint8, of no version from now on."""
        if size > self._capacity:  # another file: at the first policy, since a run's do not grow
            self.close()
            self._descriptor, self._capacity = os.memfd_create("gleaner-weights"), -(-size // _BEFORE) * _BEFORE
            os.ftruncate(self._descriptor, self._places * (_BEFORE + self._capacity))
        elif self._places == 2:
            self._offset = _BEFORE + self._capacity - self._offset
        mapping = self._mapped()
        mapping.stamp(self._offset, _WRITING)
        return mapping.room(self._offset, size)

    def _mapped(self) -> _Mapping:
        if self._mapping is None:
            self._mapping = _Mapping(self._descriptor, writes=True)
        return self._mapping

    def close(self) -> None:
        """Lets go of the memory, once no reader has it mapped any more."""
        if self._mapping is not None:
            self._mapping.end()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._mapping, self._descriptor, self._capacity, self._offset = None, -1, 0, 0


class WeightsReader:
    """The end of a generator, and of each of its processes if it has several."""

    def __init__(self) -> None:
        self._mapping: _Mapping | None = None
        self._descriptor, self._inode = -1, 0  # of what is mapped

    async def load(self, place: WeightsInFile, load: Callable[[Weights], Awaitable[str]]) -> str | None:
        """What `load` says of the weights; their place is one of this process, where they stay if the learner ends.

        None if they are not, or were not until the end, those that are meant, since the learner has written newer ones
        in their place: what was loaded is worth nothing then.

        Raises ValueLost if the learner's process has ended, EngineError if its memory cannot be mapped, else as `load`.
        """
        mapping = await asyncio.to_thread(self._mapped, place)
        with self._using(mapping):
            if mapping.version(place.offset) != place.version:
                return None
            own = place._replace(path=_path_of(self._descriptor))
            try:
                digest = await load(Weights(place.version, place.digest, mapping.payload(place), own))
            except AdapterCorrupt:
                if mapping.version(place.offset) == place.version:
                    raise
                return None
            return digest if mapping.version(place.offset) == place.version else None

    @contextmanager
    def payload(self, place: WeightsInFile) -> Iterator[memoryview]:
        """The weights, for a process of a generator that sees to their version itself. Raises as load."""
        mapping = self._mapped(place)
        with self._using(mapping):
            yield mapping.payload(place)

    @contextmanager
    def _using(self, mapping: _Mapping) -> Iterator[None]:
        try:
            yield
        finally:
            if not mapping.kept:
                self._let_go()

    def _mapped(self, place: WeightsInFile) -> _Mapping:
        if self._mapping is None or self._inode != place.inode:
            self._let_go()
            self._descriptor = _opened(place)
            self._mapping, self._inode = _Mapping(self._descriptor, writes=False), place.inode
        return self._mapping

    def _let_go(self) -> None:
        if self._mapping is not None:
            self._mapping.end()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._mapping, self._descriptor = None, -1


def _path_of(descriptor: int) -> str:
    """At which other processes of this user find the file."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _opened(place: WeightsInFile) -> int:
    """A descriptor."""
    if place.machine != machine.name():
        raise EngineError(
            f"weights v{place.version}: the learner's memory cannot be mapped from here: generators and learner of one "
            "node must run in one container"
        )
    try:
        descriptor = os.open(place.path, os.O_RDWR if _on_card() else os.O_RDONLY)
    except FileNotFoundError:
        descriptor = -1
    except OSError as error:
        raise EngineError(
            f"weights v{place.version}: the learner's memory cannot be mapped ({place.path}: {error}); generators and "
            "learner of one node must run as one user"
        ) from error
    if descriptor >= 0 and os.fstat(descriptor).st_ino == place.inode:
        return descriptor
    if descriptor >= 0:
        os.close(descriptor)
    raise ValueLost(f"weights v{place.version}: they are gone with the learner's process, which had them")


def _on_card() -> bool:
    """Whether this process computes on one."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _Mapping:
    """The file in the memory of this process, until the last tensor on it is gone.

    kept: whether it is to stay mapped between two policies. On a card it is, registered with CUDA; on a CPU what is
    mapped is of the memory that a role may take.
    """

    def __init__(self, descriptor: int, *, writes: bool) -> None:
        self.kept = _on_card()
        # What CUDA registers must be writable; on a CPU a write to what others read ends a reader's process.
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writes or self.kept else 0)
        self._bytes = as_bytes(mmap.mmap(descriptor, 0, prot=protection))
        self._registered = self.kept and self._register()

    def _register(self) -> bool:
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # In a thread of its own: a refusal stays with the thread, and would fail the next kernel that it launches.
        with ThreadPoolExecutor(1) as thread:
            error = int(thread.submit(cuda.cudaHostRegister, self._bytes.data_ptr(), self._bytes.nbytes, 0).result())
        if error:
            log.warning("CUDA did not register %d bytes (error %d): pushes are slower", self._bytes.nbytes, error)
        return not error

    def version(self, offset: int) -> int:
        """Of the policy in the place that begins there; _WRITING while there is none."""
        return int(self._bytes[offset : offset + 8].view(torch.int64)[0])

    def stamp(self, offset: int, version: int) -> None:
        """Sets it."""
        self._bytes[offset : offset + 8].view(torch.int64)[0] = version

    def room(self, offset: int, size: int) -> Tensor:
        """[size] uint8, for the weights of the place that begins there."""
        return self._bytes[offset + _BEFORE : offset + _BEFORE + size]

    def payload(self, place: WeightsInFile) -> memoryview:
        """The weights."""
        return self.room(place.offset, place.size).numpy().data

    def end(self) -> None:
        """What is registered must be given back before it is unmapped."""
        if self._registered:
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cuda.cudaHostUnregister(self._bytes.data_ptr())
