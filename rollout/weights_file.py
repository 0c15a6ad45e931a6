"""Whole weights on their way within one machine: a file in the learner's memory, which generators map.

Ray's object store would hold them twice beside the learner's own copy, in shared memory, of which a container has 64
MiB unless it is given more. The file takes none of that (memfd_create), and each policy lies in the place of the one
before: its pages are there, fresh ones would cost more than the copy, and on a card the memory stays registered with
the driver, which copies from it several times as fast.

So a reader must know that it has read one policy and no other. The learner overwrites a policy only when every
generator that it knows of has it. One that is being brought back is not waited for: it looks at the version before it
loads and afterwards, and the version is none while the learner writes (a sequence lock).
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.safetensors_stream import Source, pack
from rollout.types import AdapterCorrupt, EngineError, Weights, WeightsInFile, digest_of_weights

log = logging.getLogger("rollout")

_NAME = "gleaner-weights"
_BEFORE = 64  # bytes before the weights: the version, and room so that tensors are aligned
_WRITING = -1


class WeightsFile:
    """The learner's end."""

    def __init__(self) -> None:
        self._descriptor, self._capacity = -1, -1
        self._mapping: _Mapping | None = None

    def pack(self, version: int, sources: Mapping[str, Source], dtype: torch.dtype) -> WeightsInFile:
        """Writes the weights in the place of those before, as rollout.safetensors_stream.pack does."""
        payload = pack(sources, dtype, self._room)
        digest = digest_of_weights(payload)
        mapping = self._mapped()
        mapping.stamp(version)
        if not mapping.registered:
            self._mapping = None  # on a CPU what is mapped is of the memory that the learner may take
        return WeightsInFile(version, digest, f"/proc/{os.getpid()}/fd/{self._descriptor}", len(payload))

    def _room(self, size: int) -> Tensor:
        """[size] uint8, of no version from now on."""
        if size > self._capacity:  # another file; who has mapped the one before keeps it
            self.close()
            self._descriptor, self._capacity = os.memfd_create(_NAME), size
            os.ftruncate(self._descriptor, _BEFORE + size)
        mapping = self._mapped()
        mapping.stamp(_WRITING)
        return mapping.bytes[_BEFORE : _BEFORE + size]

    def _mapped(self) -> _Mapping:
        if self._mapping is None:
            self._mapping = _Mapping(self._descriptor)
        return self._mapping

    def close(self) -> None:
        """Lets go of the memory, once no reader has it mapped any more."""
        if self._mapping is not None:
            self._mapping.end()
            self._mapping = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self._capacity = -1, -1


class WeightsReader:
    """A generator's end."""

    def __init__(self) -> None:
        self._mapping: _Mapping | None = None
        self._of: tuple[str, int] | None = None  # path and size of what is mapped

    async def load(self, place: WeightsInFile, load: Callable[[Weights], Awaitable[str]]) -> str | None:
        """What `load` says of the weights. None if they are not, or were not until the end, those that are meant, as
        the learner has newer ones already or has ended: what was loaded is worth nothing then.

        Raises EngineError if the file cannot be mapped, else as `load`.
        """
        mapping = await asyncio.to_thread(self._mapped, place)
        if mapping is None or mapping.version != place.version:
            return None
        payload = mapping.bytes[_BEFORE : _BEFORE + place.size].numpy().data
        try:
            digest = await load(Weights(place.version, place.digest, payload))
        except AdapterCorrupt:
            if mapping.version == place.version:
                raise
            return None
        finally:
            if not mapping.registered:
                self._let_go()
        return digest if mapping.version == place.version else None

    def _mapped(self, place: WeightsInFile) -> _Mapping | None:
        """None if the learner's process, or its file, is gone."""
        if (place.path, place.size) == self._of:
            return self._mapping
        self._let_go()
        try:
            if _NAME not in os.readlink(place.path):
                return None
            with Path(place.path).open("r+b") as file:
                self._mapping = _Mapping(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EngineError(
                f"weights v{place.version}: the learner's memory cannot be mapped ({place.path}: {error}); learner and "
                "generators of one machine must run as one user"
            ) from error
        self._of = place.path, place.size
        return self._mapping

    def _let_go(self) -> None:
        if self._mapping is not None:
            self._mapping.end()
        self._mapping = self._of = None


class _Mapping:
    """A file in the memory of this process, until the last tensor on it is gone.

    bytes: [bytes of the file] uint8. registered: with CUDA, which copies from it as fast as the bus goes, in a process
    that computes on a card.
    """

    def __init__(self, descriptor: int) -> None:
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8)
        self.registered = False
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(cuda.cudaHostRegister(self.bytes.data_ptr(), self.bytes.nbytes, 0))
            self.registered = not error
            if error:
                log.warning("CUDA did not register %d bytes (error %d): pushes are slower", self.bytes.nbytes, error)

    @property
    def version(self) -> int:
        """Of the policy in it; _WRITING while there is none."""
        return int(self.bytes[:8].view(torch.int64)[0])

    def stamp(self, version: int) -> None:
        """Sets the version."""
        self.bytes[:8].view(torch.int64)[0] = version

    def end(self) -> None:
        """What is registered must be given back before it is unmapped."""
        if self.registered:
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cuda.cudaHostUnregister(self.bytes.data_ptr())
