"""Finds out what this machine has (installed packages, main and shared memory, disk, GPUs), and finds and kills the
processes that another process has started."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pynvml


def version_of(package: str) -> str | None:
    """Returns the installed version of a package without importing it; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


SHARED = Path("/dev/shm")
CGROUP, KERNEL, CPUS = Path("/sys/fs/cgroup"), Path("/proc/version"), Path("/proc/cpuinfo")


def main_memory() -> int:
    """Bytes of main memory that this process and its children may use at most: the machine's memory, or the container's
    limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_container_limits()])


def available_memory() -> int:
    """Bytes of main memory that are free or can be made so, as Linux estimates them; at most `main_memory`."""
    import psutil  # not by a reward process, which starts with this module

    return min(int(psutil.virtual_memory().available), main_memory())


def _container_limits() -> Iterator[int]:
    for file in (CGROUP / "memory.max", CGROUP / "memory" / "memory.limit_in_bytes"):  # cgroups version 2, version 1
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            yield int(text)


def processor(field: str) -> str:
    """What Linux says of the first processor, by its field of /proc/cpuinfo (`model name`, `vendor_id`, `flags`); empty
    where it does not say."""
    lines = CPUS.read_text().splitlines() if CPUS.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == field), "")


def cpu_dtype() -> str:
    """The type in which this machine's processors multiply fastest."""
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(processor("flags").split()) else "float32"


def shared_memory() -> int | None:
    """Free bytes of /dev/shm, where Ray keeps its object store; None if the machine has no /dev/shm."""
    return shutil.disk_usage(SHARED).free if SHARED.is_dir() else None


def free_disk(folder: Path) -> int:
    """Free bytes of the file system where `folder` is, or would be created."""
    return shutil.disk_usage(_existing(folder)).free


def device_of(folder: Path) -> int:
    """Device number of the file system where `folder` is, or would be created; equal for folders on one file system."""
    return _existing(folder).stat().st_dev


def _existing(folder: Path) -> Path:
    return next(path for path in [folder, *folder.parents] if path.exists())


def is_wsl() -> bool:
    """Whether this Linux runs inside Windows."""
    return "microsoft" in KERNEL.read_text().lower()


def name() -> str:
    """Returns the boot id of the kernel and the PID namespace. If two processes have the same name, each can open files
    of the other under /proc/<pid>."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"boot {boot}, {os.readlink('/proc/self/ns/pid')}"


# NVIDIA GPUs, asked of NVML, the driver's own library, which starts no CUDA context. A machine without a driver or a
# GPU gives an empty list and no exception.

TAKEN = 0.05  # share of a GPU's memory; its driver keeps less for itself (cluster.memory.plan.CardKind.free)


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, or one MIG part of a GPU.

    size, free: bytes of memory in all, and bytes that no process uses now. capability: the CUDA compute capability, for
    example (9, 0). divided: it is in MIG mode, and CUDA shows a part of it in its place.
    """

    name: str
    uuid: str
    size: int
    free: int
    capability: tuple[int, int]
    divided: bool = False

    @property
    def taken(self) -> bool:
        """Whether other processes use so much of its memory that the user should be told."""
        return self.size - self.free > TAKEN * self.size


def visible_cards(environ: Mapping[str, str] = os.environ) -> list[Card]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, in its order; without that variable all GPUs, in NVML's order; without
    those of which NVML does not tell the memory.

    The variable is read as CUDA reads it: it lists indices, UUIDs or beginnings of UUIDs, and the list ends before the
    first entry that names no GPU.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # the machine has no library of NVML, no driver, or no GPU
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        named = environ.get("CUDA_VISIBLE_DEVICES")
        shown = handles if named is None else _chosen(handles, named)
        return [card for card in map(_card, shown) if card is not None]
    finally:
        pynvml.nvmlShutdown()


def usable_cards() -> list[Card]:
    """The visible GPUs that a run may take by itself: none where the torch that is installed is a build for CPUs, and
    none that is divided by MIG, unless CUDA_VISIBLE_DEVICES names a part of it."""
    return [card for card in visible_cards() if not card.divided] if torch_cuda() else []


def torch_cuda() -> str | None:
    """The CUDA version that torch is built for (`13.0`), '' for a CPU build, None without torch. Imports nothing."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    lines = (Path(spec.origin).parent / "version.py").read_text().splitlines()
    found = next((line.partition("=")[2] for line in lines if line.startswith("cuda")), "None").strip()
    return "" if found == "None" else found.strip("'\"")


def card_driver_version() -> str | None:
    """Version of the NVIDIA driver; None if there is no driver."""
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


def _card(handle: object) -> Card | None:
    """The GPU; None if NVML does not tell its memory, as of one that has fallen off the bus or shares the machine's."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError:
        return None
    return Card(
        pynvml.nvmlDeviceGetName(handle),
        pynvml.nvmlDeviceGetUUID(handle),
        int(memory.total),
        int(memory.free),
        _capability(handle),
        _divided(handle),
    )


def _divided(handle: object) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError:  # it knows no MIG, or is a part itself
        return False


def _capability(handle: object) -> tuple[int, int]:
    """The compute capability of a GPU; for a MIG part that of its GPU."""
    try:
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(parent)
    return int(major), int(minor)


def sleeping_threads(count: int | None = None) -> None:
    """Makes OpenMP's threads sleep while they wait for one another. count: how many threads to use (None: the default).

    By default the threads spin. On cores that other processes use too, they then spin for a thread that has no core,
    and a forward pass takes six times as long; its result is the same to the bit. Must be called before torch is
    loaded. An OMP_WAIT_POLICY that the user has set is kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if count is not None:
        os.environ["OMP_NUM_THREADS"] = str(count)


# Processes that a process has started, directly or not, even in a process group or session of their own. Linux only:
# elsewhere none are found.

MARK = "GLEANER_MARK"  # an environment variable that child processes inherit; rewards.limits does not withhold it


def descendants(pid: int) -> list[int]:
    """Descendants of a living process, without those that have detached themselves from their parents."""
    found, asked = list[int](), [pid]
    while asked:
        children = _children(asked.pop())
        found += children
        asked += children
    return found


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        tasks = os.listdir(f"/proc/{pid}/task")
        return [int(child) for task in tasks for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    return []


def kill(pids: list[int]) -> None:
    """Sends SIGKILL to each process that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def sweep(found: Callable[[], list[int]], patience_s: float) -> None:
    """Kills the processes that `found` returns, again and again until it returns none, since they may start others
    meanwhile; gives up after `patience_s` seconds."""
    deadline = time.monotonic() + patience_s
    while left := found():
        kill(left)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """Processes whose variable MARK is `mark`, without this process."""
    return [pid for pid, own in _marks() if own == mark]


def orphans(mark: str) -> list[int]:
    """Processes whose variable MARK is `mark` followed by the process id of another process that has ended."""
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
        # The process may have ended, or belong to another user.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                if entry.startswith(begin) and int(folder.name) != os.getpid():
                    yield int(folder.name), entry[len(begin) :].decode(errors="replace")
