"""The NVIDIA cards that processes of this machine would see, by NVML: the driver's own library, which starts no CUDA
context. A machine without driver or cards has none; no exception says so."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import pynvml

TAKEN = 0.05  # of a card: more than its driver keeps for itself (cluster.memory.cards.CardKind.free)


@dataclass(frozen=True, slots=True)
class Card:
    """One card, or one MIG part of it.

    size, free: bytes; free is what no process has now. capability: CUDA's, for example (9, 0).
    """

    name: str
    uuid: str
    size: int
    free: int
    capability: tuple[int, int]

    @property
    def taken(self) -> bool:
        """Whether other processes have so much of it that a user should know."""
        return self.size - self.free > TAKEN * self.size


def visible_cards(environ: Mapping[str, str] = os.environ) -> list[Card]:
    """The cards that CUDA_VISIBLE_DEVICES names, in its order; without it all of them, in the order of their slots.

    As CUDA reads it: indices, or UUIDs or beginnings of them; what comes behind the first name of no card is not seen.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no library, no driver, or no card
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        named = environ.get("CUDA_VISIBLE_DEVICES")
        return [_card(handle) for handle in (handles if named is None else _chosen(handles, named))]
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str | None:
    """Of the NVIDIA driver; None without one."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _chosen(handles: list[object], named: str) -> list[object]:
    chosen: list[object] = []
    for name in (part.strip() for part in named.split(",")):
        found = [handles[int(name)]] if name.isdecimal() and int(name) < len(handles) else _by_uuid(handles, name)
        if len(found) != 1:
            break
        chosen += found
    return chosen


def _by_uuid(handles: list[object], name: str) -> list[object]:
    if name.startswith("MIG-"):
        try:
            return [pynvml.nvmlDeviceGetHandleByUUID(name)]
        except pynvml.NVMLError:
            return []
    return [handle for handle in handles if name and pynvml.nvmlDeviceGetUUID(handle).startswith(name)]


def _card(handle: object) -> Card:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Card(
        pynvml.nvmlDeviceGetName(handle),
        pynvml.nvmlDeviceGetUUID(handle),
        int(memory.total),
        int(memory.free),
        _capability(handle),
    )


def _capability(handle: object) -> tuple[int, int]:
    """A MIG part has that of its card."""
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(parent)
    return int(major), int(minor)
