"""What this machine has beside its cards: main memory, shared memory, free disk, whether it is WSL2, and its name."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

SHARED = Path("/dev/shm")
CGROUP, PROC_MEMORY, KERNEL = Path("/sys/fs/cgroup"), Path("/proc/meminfo"), Path("/proc/version")


def main_memory() -> int:
    """Bytes that this process and its children may use at most: of the machine, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_container_limits()])


def available_memory() -> int:
    """Bytes of main memory that are free or can be made so, as Linux estimates them; at most `main_memory`."""
    rows = (line.partition(":") for line in PROC_MEMORY.read_text().splitlines())
    kilobytes = {name: value.split()[0] for name, _, value in rows if value.split()}
    return min(int(kilobytes["MemAvailable"]) * 1024, main_memory())


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
