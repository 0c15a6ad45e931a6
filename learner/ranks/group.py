"""The process group of the learner's ranks: torch.distributed, with gloo between processes and NCCL between GPUs.

All operations have a time-out of gleaner's, since torch's default is half an hour. A rank that dies closes its
connections, so the others notice within a second. A rank that hangs is found by its pulse (learner.ranks.ranks.Regroup)
long before the time-out.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import (
    _abort_process_group,
    all_gather,
    all_reduce,
    broadcast,
    destroy_process_group,
    init_process_group,
    is_initialized,
)

from cluster.actor import Unusable
from learner.ranks.ranks import PEER_LOST, Meeting
from learner.trainer.optimizer import Peers

# Messages between ranks: JSON for plain values, followed by the contents of tensors. torch's gathering of objects is
# not used, since it unpickles what it receives: a port has no password, and a pickle can run any code.

TENSOR = "tensor"  # the key of the object that stands for a tensor: its dtype, its shape, and where its content begins
LENGTH = 8  # bytes that hold the length of the JSON


def packed(value: Any) -> bytes:
    """Returns the message of a value: lists, tuples, dictionaries with names as keys, numbers, text, and tensors on any
    device."""
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
    """Returns the value of a message that `packed` made. Tuples come back as lists, tensors in main memory."""
    begins = LENGTH + int.from_bytes(message[:LENGTH], "little")
    contents = message[begins:]

    def tensor(found: dict[str, Any]) -> Any:
        if found.keys() != {TENSOR}:
            return found
        kind, shape, start = found[TENSOR]
        count = int(np.prod(shape, dtype=np.int64))
        return torch.from_numpy(np.frombuffer(contents, kind, count, start).reshape(shape).copy())

    return json.loads(message[LENGTH:begins], object_hook=tensor)


T = TypeVar("T")

MOST_SAID = 160  # most characters of torch's message in an error


class Group(Peers):
    """The process group as one rank sees it. `join` must be called before anything else, except `open` on rank 0.

    rank: number of this rank. count: number of ranks.
    device: the device of the tensors that are summed.
    sharded: whether the base is sharded over the ranks.
    """

    def __init__(self, rank: int, count: int, device: str, *, sharded: bool = False) -> None:
        self.rank, self.count, self._device, self.sharded = rank, count, torch.device(device), sharded
        self._store: TCPStore | None = None
        self._abandoned = False

    def open(self, host: str, start_s: float) -> int:
        """Opens a store that listens on this address alone (torch would listen on all), and returns its port."""
        listening = socket.create_server((host, 0))
        port: int = listening.getsockname()[1]
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=start_s),
            master_listen_fd=listening.detach(),
        )  # fmt: skip
        return port

    def join(self, meeting: Meeting, address: str) -> None:
        """Waits for all ranks and forms the group. address: the address of this node on which gloo listens.

        A sum by NCCL that fails or takes too long is made to raise where it is waited for, as a sum by gloo does. By
        torch's default it would end the process, whose state a fresh rank may need. The first sum is made here, since
        the GPUs connect during it, and `abandon` cannot end that.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
        # With a sharded base no rank outlives another, so such errors help nobody; and layers are gathered ahead of
        # their use, which blocking waits would delay.
        if not self.sharded:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
        self._abandoned = False
        with self._or_lost():
            store = self._store or TCPStore(
                meeting.host, meeting.port, is_master=False, timeout=timedelta(seconds=meeting.start_s)
            )
            init_process_group(
                "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
                store=store, rank=self.rank, world_size=self.count, timeout=timedelta(seconds=meeting.step_s),
            )  # fmt: skip
            if self._device.type == "cuda":
                _summed(torch.zeros(1, device=self._device))

    def abandon(self) -> None:
        """Aborts NCCL operations that wait for a lost rank, so that the thread that waits for the GPU goes on: NCCL
        between GPUs of one node does not notice the loss. The aborted calls raise. gloo's operations end by
        themselves."""
        if self._device.type == "cuda" and is_initialized():
            self._abandoned = True
            _abort_process_group()

    def leave(self) -> None:
        """Destroys a group from which a rank was lost; does nothing if there is no group."""
        if is_initialized():
            destroy_process_group()

    def broadcast(self, own: bytes, source: int) -> bytes:
        """Returns on every rank the bytes that rank `source` gives."""
        with self._or_lost():
            size = torch.tensor([len(own)])
            broadcast(size, source)
            sent = torch.frombuffer(bytearray(own), dtype=torch.uint8) if self.rank == source else None
            buffer = torch.empty(int(size), dtype=torch.uint8) if sent is None else sent
            broadcast(buffer, source)
        return own if self.rank == source else buffer.numpy().tobytes()

    def sum(self, values: Tensor) -> None:
        with self._or_lost():
            _summed(values)

    def gather(self, own: T) -> list[T]:
        sent = torch.frombuffer(bytearray(packed(own)), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        with self._or_lost():
            all_gather(sizes, torch.tensor([len(sent)]))
            longest = int(max(sizes))
            room = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.count)]
            filled = torch.zeros(longest, dtype=torch.uint8)
            filled[: len(sent)] = sent
            all_gather(room, filled)
        return [unpacked(one[: int(size)].numpy().tobytes()) for one, size in zip(room, sizes, strict=True)]

    @contextmanager
    def _or_lost(self) -> Iterator[None]:
        """Raises Unusable with PEER_LOST for an error in this block, which means that another rank is gone: this rank
        is intact, but cannot go on alone."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch raises ValueError for a group that was abandoned
            if isinstance(error, RuntimeError) or self._abandoned:
                raise peer_lost(error) from error
            raise
        if self._abandoned:
            raise peer_lost(RuntimeError("what it was to give was abandoned"))


def interface_of(address: str) -> str:
    """Returns the name of the network interface that has this address, as gloo knows it. Raises ValueError if none
    has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (one.address for one in addresses):
            return str(name)
    raise ValueError(f"cluster.address: Ray names this node {address}, and no network interface here has that address")


def _summed(values: Tensor) -> None:
    work = all_reduce(values, async_op=True)  # a synchronous call would wait for NCCL in C++, and raise nothing
    assert work is not None
    work.wait()


def peer_lost(error: Exception) -> Unusable:
    """Returns the error to raise instead of torch's error when another rank did not answer."""
    return Unusable(f"{PEER_LOST} ({str(error).splitlines()[0][:MOST_SAID]})")
