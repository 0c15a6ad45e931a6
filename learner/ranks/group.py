"""The ranks' process group: torch.distributed, with gloo between processes and NCCL between cards.

Everything has a time-out of its own, since torch's is half an hour. A rank that dies closes its connections, so the
others notice within a second; one that hangs is found by its pulse (learner.driver.failure), long before.
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

# What ranks send each other, as bytes: JSON for plain values, and the contents of tensors behind it.
#
# Not torch's gathering of objects, which are pickled: a port has no password, and a pickle is a program.

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


T = TypeVar("T")

MOST_SAID = 160  # characters of torch's own words


class Group(Peers):
    """Of one rank; `join` comes before anything else.

    device: that the sums are on. sharded: whether the base is divided among the ranks.
    """

    def __init__(self, rank: int, count: int, device: str, *, sharded: bool = False) -> None:
        self.rank, self.count, self._device, self.sharded = rank, count, torch.device(device), sharded
        self._store: TCPStore | None = None
        self._abandoned = False

    def open(self, host: str, start_s: float) -> int:
        """A store that listens on this address alone (torch's own choice is all of them); its port."""
        listening = socket.create_server((host, 0))
        port: int = listening.getsockname()[1]
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=start_s),
            master_listen_fd=listening.detach(),
        )  # fmt: skip
        return port

    def join(self, meeting: Meeting, address: str) -> None:
        """Waits for all ranks. address: of this node, on which gloo listens.

        A sum by NCCL that fails or takes too long raises where it is waited for, as one by gloo does. By torch's
        default it would end the process, from whose state a fresh rank could go on. The first one is made here, since
        it is then that the cards connect, which `abandon` cannot end.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
        if not self.sharded:  # else no rank outlives another, and layers are gathered ahead of their use
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
        """Ends what waits on a card for a rank that is gone, so that the thread that waits for the card goes on: NCCL
        between cards of one node does not notice. What was to be exchanged is worth nothing, and whoever asked for it
        hears that. gloo ends by itself."""
        if self._device.type == "cuda" and is_initialized():
            self._abandoned = True
            _abort_process_group()

    def leave(self) -> None:
        """Lets go of a group of which another rank is gone; nothing happens without one."""
        if is_initialized():
            destroy_process_group()

    def broadcast(self, own: bytes, source: int) -> bytes:
        """What rank `source` gives."""
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
        """What fails here fails for another rank's sake: this one is whole, and of no use without it."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # ValueError: what was abandoned is no group of torch's any more
            if isinstance(error, RuntimeError) or self._abandoned:
                raise peer_lost(error) from error
            raise
        if self._abandoned:
            raise peer_lost(RuntimeError("what it was to give was abandoned"))


def interface_of(address: str) -> str:
    """The network interface that has this address, by the name that gloo knows. ValueError if none has."""
    for name, addresses in psutil.net_if_addrs().items():
        if address in (one.address for one in addresses):
            return str(name)
    raise ValueError(f"cluster.address: Ray names this node {address}, and no network interface here has that address")


def _summed(values: Tensor) -> None:
    work = all_reduce(values, async_op=True)  # else torch waits for NCCL in C++, and raises nothing
    assert work is not None
    work.wait()


def peer_lost(error: Exception) -> Unusable:
    """To be raised in the place of what torch said when another rank did not answer."""
    return Unusable(f"{PEER_LOST} ({str(error).splitlines()[0][:MOST_SAID]})")
