"""Carries whole weights from the learner to the generators, and makes the digests by which their arrival is proven.

The weights are packed as safetensors bytes. Within one machine they lie in a file in memory (WeightsFile), which
generators map (WeightsReader). rollout.types.Weights and WeightsInFile describe what is sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import mmap
import os
import struct
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cluster import machine
from cluster.actor import ValueLost
from rollout.types import AdapterCorrupt, EngineError, Weights, WeightsInFile, digest_of_weights


def as_bytes(memory: bytes | memoryview | mmap.mmap) -> Tensor:
    """[bytes] uint8, a tensor on the memory itself; without torch's warning where the memory is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(memory, dtype=torch.uint8)


# Safetensors, written and read one tensor at a time.
#
# safetensors' own save and load hold everything two or three times over. Whole weights are gigabytes, so each tensor is
# written directly to its place among the bytes, and is read there. The format is: 8 bytes of length, little endian; a
# JSON object of that length, name -> dtype, shape and place in the rest; the tensors, without gaps.

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Source(NamedTuple):
    """A tensor to be packed. write(place) fills `place`, a tensor of that shape, when the tensor's turn comes."""

    shape: Sequence[int]
    write: Callable[[Tensor], object]

    @classmethod
    def of(cls, tensor: Tensor) -> Source:
        """A source for a tensor that exists already."""
        return cls(tensor.shape, lambda place: place.copy_(tensor))


def _fresh_bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


@torch.no_grad()
def pack(sources: Mapping[str, Source], dtype: torch.dtype, room: Callable[[int], Tensor] = _fresh_bytes) -> memoryview:
    """All tensors in `dtype` as safetensors bytes. room: number of bytes -> the uint8 tensor to write them to."""
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
    """Writes all tensors in `dtype` to a safetensors file that transformers can load, with no more than one tensor in
    memory at a time."""
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
    """Returns (the bytes before the tensors, where each tensor begins and ends behind these bytes, by name)."""
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
    """Returns (dtype, shape and data_offsets of each tensor by name; the byte at which the tensors begin).

    Raises struct.error, ValueError or AttributeError for bytes that are not safetensors.
    """
    (length,) = struct.unpack_from("<Q", payload)
    header: dict[str, Any] = json.loads(bytes(payload[8 : 8 + length]))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}, 8 + length


def unpack(payload: bytes | memoryview) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each weight, on the payload's own memory.

    The tensors must not be written to: other processes read the same memory, and it may be mapped read-only. A copy
    would cost a second for each gigabyte, nearly all of it for fresh pages.
    """
    header, begin = header_of(payload)
    whole = as_bytes(payload)
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        yield name, whole[begin + start : begin + end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])


# Whole weights within one machine: a file in the learner's memory, which generators map.
#
# In Ray's object store whole weights would be one more copy, in shared memory, of which a container has 64 MiB unless
# it is given more. The file takes no shared memory (memfd_create). It has two places, and a policy is written over the
# policy before the last: the pages of that place exist already, while fresh pages would cost more than the copy itself.
# In a process on a card they also stay registered with CUDA, which then copies from them several times as fast.
#
# The place of version v is overwritten with v + 2 when every generator that the driver waits for has loaded v, and
# v + 1 is published. Nobody waits for a generator that is being replaced, so such a one may still be reading v. It
# compares the version of the place before and after loading; while the learner writes, the place has no version (a
# sequence lock).

log = logging.getLogger("rollout")

_BEFORE = 64  # bytes of a place before the weights: they hold the version, and keep the tensors aligned
_WRITING = -1  # the version of a place that is being written


class WeightsFile:
    """The file as the learner writes it.

    places: how many policies it has room for, 1 or 2. With 2 a policy is written over the policy before the last.
    """

    def __init__(self, places: int = 2) -> None:
        self._places = places
        self._descriptor, self._capacity = -1, 0
        self._offset = 0  # where the newest policy's place begins
        self._mapping: _Mapping | None = None

    def pack(self, version: int, sources: Mapping[str, Source], dtype: torch.dtype) -> WeightsInFile:
        """Packs the weights into the next place."""
        payload = pack(sources, dtype, self._room)
        return self._written(version, digest_of_weights(payload), len(payload))

    def copy(self, weights: Weights) -> WeightsInFile:
        """Copies weights that are packed already into the next place."""
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
        """[size] uint8: the place for the next policy, which has no version until it is written."""
        if size > self._capacity:  # true for the first policy only: the weights of a run do not grow
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
        """Unmaps and closes the file. Its memory is freed once no reader has it mapped any more."""
        if self._mapping is not None:
            self._mapping.end()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._mapping, self._descriptor, self._capacity, self._offset = None, -1, 0, 0


class WeightsReader:
    """Maps the learner's file into a generator's process; each process of a generator with shards has its own."""

    def __init__(self) -> None:
        self._mapping: _Mapping | None = None
        self._descriptor, self._inode = -1, 0  # of the mapped file

    async def load(self, place: WeightsInFile, load: Callable[[Weights], Awaitable[str]]) -> str | None:
        """Calls `load` with the weights on the mapped memory, and returns its result.

        The `place` of these Weights names this process's descriptor of the file, which is valid even if the learner
        ends. None if the learner overwrote the weights with newer ones before or during the load; what was loaded is
        worthless then.

        Raises ValueLost if the learner's process has ended, EngineError if its memory cannot be mapped, and whatever
        `load` raises.
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
        """The weights on the mapped memory, for a caller whose generator checks the version itself. Raises ValueLost
        and EngineError as `load` does."""
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
    """The path by which other processes of this user can open the file."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _opened(place: WeightsInFile) -> int:
    """A descriptor of the learner's file."""
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
    """Whether this process computes on a card."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _Mapping:
    """The file mapped into this process. The mapping lasts until the last tensor on it is gone.

    kept: whether the file stays mapped between two policies. On a card it does, registered with CUDA. On a CPU it does
    not, since mapped memory counts towards the memory that a role may take.
    """

    def __init__(self, descriptor: int, *, writes: bool) -> None:
        self.kept = _on_card()
        # CUDA registers writable memory only. On a CPU readers map read-only, so that a write ends their process.
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writes or self.kept else 0)
        self._bytes = as_bytes(mmap.mmap(descriptor, 0, prot=protection))
        self._registered = self.kept and self._register()

    def _register(self) -> bool:
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # CUDA keeps an error with the thread and raises it at the thread's next kernel, so this thread is a fresh one.
        with ThreadPoolExecutor(1) as thread:
            error = int(thread.submit(cuda.cudaHostRegister, self._bytes.data_ptr(), self._bytes.nbytes, 0).result())
        if error:
            log.warning("CUDA did not register %d bytes (error %d): pushes are slower", self._bytes.nbytes, error)
        return not error

    def version(self, offset: int) -> int:
        """Version of the policy in the place that begins at `offset`; _WRITING while it is being written."""
        return int(self._bytes[offset : offset + 8].view(torch.int64)[0])

    def stamp(self, offset: int, version: int) -> None:
        """Sets the version of the place that begins at `offset`."""
        self._bytes[offset : offset + 8].view(torch.int64)[0] = version

    def room(self, offset: int, size: int) -> Tensor:
        """[size] uint8: the weights of the place that begins at `offset`."""
        return self._bytes[offset + _BEFORE : offset + _BEFORE + size]

    def payload(self, place: WeightsInFile) -> memoryview:
        """The bytes of the weights."""
        return self.room(place.offset, place.size).numpy().data

    def end(self) -> None:
        """Unregisters the memory with CUDA, which must happen before it is unmapped."""
        if self._registered:
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cuda.cudaHostUnregister(self._bytes.data_ptr())


# Digests of a policy's tensors, which the learner and an engine each compute, and which are then compared.
#
# Names and shapes are those of the payload (PEFT's for an adapter, the checkpoint's for weights). The values are those
# that an engine computes with: in its dtype, and with alpha / r multiplied into an adapter's B, as vLLM does on
# loading. So the bytes that arrived do not give the digests; an engine must read the tensors in use.

COLUMNS = 64  # columns of a matrix that are read back; see columns_of
_SMALL = 1 << 20  # bytes of a tensor below which a thread costs more than it saves


def digest_of_tensor(tensor: Tensor) -> str:
    """sha256 hex of dtype, shape and values (bit for bit, so that -0.0 is not 0.0)."""
    values = tensor.detach().to("cpu").contiguous()
    found = hashlib.sha256(f"{values.dtype} {tuple(values.shape)}".encode())
    found.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def digests_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The digest of each tensor by name. Large tensors are hashed in threads, of which each holds one at a time."""
    threads = min(8, os.cpu_count() or 1)
    found: dict[str, str] = {}
    pending: deque[tuple[str, Future[str]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for name, tensor in tensors:
            if tensor.nbytes < _SMALL:
                found[name] = digest_of_tensor(tensor)
                continue
            # The copy is made in this thread: another thread's stream would not wait for the kernel that computes it.
            pending.append((name, pool.submit(digest_of_tensor, tensor.detach().to("cpu"))))
            if len(pending) >= threads:
                first, digest = pending.popleft()
                found[first] = digest.result()
        found |= {name: digest.result() for name, digest in pending}
    return found


def read_of(weight: Tensor, version: int, dtype: torch.dtype) -> Tensor:
    """The part of a weight that is read back, in `dtype`: of a matrix a copy of the columns that columns_of chooses,
    any other weight whole."""
    if weight.dim() != 2:
        return weight.to(dtype)
    return columns_read(weight, columns_of(version, weight.shape[1]), dtype)


def columns_read(weight: Tensor, columns: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[rows, len(columns)]: these columns of a matrix, in `dtype` or that of the matrix."""
    # An engine may read columns by products (see columns_of), which never give -0.0. Adding zero turns -0.0 into 0.0.
    return weight[:, columns.to(weight.device)].to(dtype or weight.dtype) + 0.0


@lru_cache(maxsize=16)  # a model has few widths and many matrices
def columns_of(version: int, width: int) -> Tensor:
    """[min(width, COLUMNS)] int64, ascending: the columns of a matrix that are read back, drawn anew for each version.

    Whole weights are gigabytes, and a CPU's kernels keep a repacked copy of them, which can be read only by multiplying
    with unit vectors. That is exact, and for COLUMNS columns it costs as much as a prompt of COLUMNS tokens. A few
    columns are enough: the digest of the payload proves that all bytes arrived, and a matrix that a load left unchanged
    differs in every column.
    """
    chosen = np.random.default_rng(version).choice(width, min(width, COLUMNS), replace=False)
    return torch.from_numpy(np.sort(chosen))


# The order of rows in Llama 4's queries and keys. Its rotary embedding turns two neighbouring numbers of a head
# together; vLLM's turns a number of the head's first half with one of its second. So vLLM brings the rows of these
# weights into that order when it loads them (its llama4.py), but not those of an adapter's B.

_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def turned_heads(config: Any, layer: str) -> int:
    """How many heads a layer has whose rows vLLM holds in the order of `in_halves`; 0 if it leaves them as they are.

    config: transformers' configuration of a text model. layer: the last part of the layer's name.
    """
    return int(getattr(config, _HEADS[layer])) if config.model_type == "llama4_text" and layer in _HEADS else 0


def in_halves(weight: Tensor, heads: int) -> Tensor:
    """[rows, columns] with the even rows of each head before its odd ones."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """The inverse of in_halves."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


# The layers that LoRA may adapt: the learner puts adapters on them, a generator gives them LoRA kernels.


def linear_layers(lm: Any) -> set[str]:
    """Names of all linear layers, except the output embedding, of a causal language model of transformers."""
    head = lm.get_output_embeddings()
    return {name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module is not head}
