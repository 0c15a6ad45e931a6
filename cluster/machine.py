"""What this machine has: main and shared memory, disk, cards, installed packages, and the processes of a tree."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pynvml

# Which version of a package is installed, without importing it.


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


SHARED = Path("/dev/shm")
CGROUP, KERNEL = Path("/sys/fs/cgroup"), Path("/proc/version")


def main_memory() -> int:
    """Bytes that this process and its children may use at most: of the machine, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_container_limits()])


def available_memory() -> int:
    """Bytes of main memory that are free or can be made so, as Linux estimates them; at most `main_memory`."""
    import psutil  # not by a reward process, which starts with this module

    return min(int(psutil.virtual_memory().available), main_memory())


def _container_limits() -> Iterator[int]:
    for file in (CGROUP / "memory.max", CGROUP / "memory" / "memory.limit_in_bytes"):  # of cgroups 2 and 1
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            yield int(text)


def shared_memory() -> int | None:
    """Free bytes of /dev/shm, where Ray keeps its object store; None: there is none."""
    return shutil.disk_usage(SHARED).free if SHARED.is_dir() else None


def free_disk(folder: Path) -> int:
    """Free bytes where `folder` is, or would be made."""
    return shutil.disk_usage(_existing(folder)).free


def device_of(folder: Path) -> int:
    """Tells file systems apart: of where `folder` is, or would be made."""
    return _existing(folder).stat().st_dev


def _existing(folder: Path) -> Path:
    return next(path for path in [folder, *folder.parents] if path.exists())


def is_wsl() -> bool:
    """Whether this Linux runs inside Windows."""
    return "microsoft" in KERNEL.read_text().lower()


def name() -> str:
    """What two processes have in common if one can open the other's files by its process number: this boot of the
    kernel, and the numbering of processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"boot {boot}, {os.readlink('/proc/self/ns/pid')}"


# The NVIDIA cards that processes of this machine would see, by NVML: the driver's own library, which starts no CUDA
# context. A machine without driver or cards has none; no exception says so.

TAKEN = 0.05  # of a card: more than its driver keeps for itself (cluster.memory.plan.CardKind.free)


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


def card_driver_version() -> str | None:
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


# Compute threads of a command that computes in its own process, beside whatever else the machine does.


def sleeping_threads(count: int | None = None) -> None:
    """Has OpenMP's threads sleep while they wait for one another; `count`: how many there are, where it must be that.

    By default they spin: on cores that others use as well, each waits at full load for one that has no core, and a
    forward pass takes six times as long. What is computed is the same to the bit. To be called before torch loads; what
    the user's environment says of the waiting stays.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if count is not None:
        os.environ["OMP_NUM_THREADS"] = str(count)


# Processes that a process has started, and those have, and so on; whatever group or session they have made for
# themselves. Linux only: elsewhere none are found.

MARK = "GLEANER_MARK"  # what processes hand on to those that they start, and are known by; rewards.limits lets it by


def descendants(pid: int) -> list[int]:
    """Those of a living process; what has detached itself from its parent is not among them."""
    found, asked = list[int](), [pid]
    while asked:
        children = _children(asked.pop())
        found += children
        asked += children
    return found


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        tasks = os.listdir(f"/proc/{pid}/task")
        return [int(child) for task in tasks for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return []


def kill(pids: list[int]) -> None:
    """SIGKILL to each that is there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sweep(found: Callable[[], list[int]], patience_s: float) -> None:
    """Ends all processes that are found, those too that they start meanwhile. They are waited for no longer than
    `patience_s`."""
    deadline = time.monotonic() + patience_s
    while left := found():
        kill(left)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """All that have this mark, but for this process."""
    return [pid for pid, own in _marks() if own == mark]


def orphans(mark: str) -> list[int]:
    """All whose mark begins so and ends in the number of a process that is no more."""
    found = [(pid, own.removeprefix(mark)) for pid, own in _marks() if own.startswith(mark)]
    return [pid for pid, number in found if number.isdecimal() and int(number) != pid and not _lives(int(number))]


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _marks() -> Iterator[tuple[int, str]]:
    begin = f"{MARK}=".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is another user's
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                if entry.startswith(begin) and int(folder.name) != os.getpid():
                    yield int(folder.name), entry[len(begin) :].decode(errors="replace")
