"""Rows of a GPU benchmark: each in a process of its own, so that an out-of-memory is a result and not the end; kept as
one JSON each, so that a session that was cut off goes on where it stopped. And the command line that such benchmarks
have in common.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import LEARNER_PACKAGES, RESULTS, ROOT, conditions, parser_of

Found = dict[str, Any]
TOKENIZER = ROOT / "examples" / "tiny-gsm8k"
KEPT = ("ok", "oom")  # other rows are tried again


@dataclass(frozen=True, slots=True)
class Row:
    """`work` gets the device and returns what was measured."""

    name: str
    work: Callable[[str], Found]


class Missing(Exception):
    """The row needs a package that is not installed here; the message names it."""


def folder_for(device: str, tiny: bool) -> Path:
    """benchmarks/results/gpu/<card>-<date>; of a rehearsal build/rehearsal, which is not committed."""
    if tiny:
        return Path("build") / "rehearsal"
    card = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    return RESULTS / "gpu" / f"{card.lower().replace(' ', '-')}-{time.strftime('%Y-%m-%d')}"


def told_of(device: str) -> dict[str, Any]:
    """benchmarks.common.conditions, and the card."""
    told = conditions((*LEARNER_PACKAGES, "vllm", "ray", "bitsandbytes", "liger-kernel"))
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        told |= {
            "card": properties.name,
            "bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "driver": subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        }
    return told


def run_here(row: Row, device: str, file: Path) -> None:
    """In the row's own process."""
    from learner.trainer.memory_limit import OutOfMemory

    started = time.perf_counter()
    try:
        found = {"status": "ok", **row.work(device)}
    except (torch.OutOfMemoryError, OutOfMemory) as error:
        found = {"status": "oom", "error": str(error).splitlines()[0]}
    except Missing as error:
        found = {"status": "missing", "error": str(error)}
    found |= {"row": row.name, "seconds": round(time.perf_counter() - started, 1), "conditions": told_of(device)}
    file.write_text(json.dumps(found, indent=1) + "\n")


def run_all(module: str, rows: Sequence[Row], folder: Path, options: Sequence[str], minutes: float) -> dict[str, Found]:
    """All rows that are not there yet, in order, while the time lasts; what is there then, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    for row in rows:
        file, left = folder / f"{row.name}.json", end - time.monotonic()
        if file.exists() and json.loads(file.read_text())["status"] in KEPT:
            print(f"{row.name}: there already", flush=True)
        elif left <= 0:
            print(f"{row.name}: no time left, the same command goes on", flush=True)
        else:
            _spawn([sys.executable, "-m", module, "--row", row.name, *options], row.name, file, left)
    files = [folder / f"{row.name}.json" for row in rows]
    return {file.stem: json.loads(file.read_text()) for file in files if file.exists()}


def _spawn(command: list[str], name: str, file: Path, left: float) -> None:
    """What a row said that is not "ok" stays beside the others, as <row>.log."""
    file.unlink(missing_ok=True)
    log = file.with_suffix(".log")
    with log.open("w") as said:
        # A session of its own: the run that a row starts holds the card, and must not outlive the row.
        child = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(timeout=left)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            print(f"{name}: cut off, no time left", flush=True)
            return
    if not file.exists():
        tail = log.read_text().strip().splitlines()[-40:]
        file.write_text(json.dumps({"status": "failed", "row": name, "code": code, "error": tail}, indent=1))
    found = json.loads(file.read_text())
    if found["status"] == "ok":
        log.unlink()
    print(f"{name}: {found['status']} {found.get('error', '')} ({found.get('seconds', 0)} s)", flush=True)


def options_of(description: str | None, minutes: float, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Of these arguments, or of the process's own. minutes: the default of --minutes. A card must be there, or --device
    cpu said."""
    parser = parser_of(description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.1M to 0.3M weights, to rehearse")
    parser.add_argument("--minutes", type=float, default=minutes, help="no row is begun later, and none goes on")
    parser.add_argument("--tokenizer", default=str(TOKENIZER), help="folder of a tokenizer")
    parser.add_argument("--models", default="build/models", help="where the random models are made")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin so")
    parser.add_argument("--folder", type=Path, help="of the results, to go on with those of another day")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.folder = (options.folder or folder_for(options.device, options.tiny)).absolute()
    return options


def passed_on(options: argparse.Namespace) -> list[str]:
    """To the process of a row."""
    told = ["--device", options.device, "--folder", str(options.folder), "--tokenizer", options.tokenizer]
    return [*told, "--models", options.models, *(["--tiny"] if options.tiny else [])]


def measured(
    module: str, options: argparse.Namespace, planned: Sequence[Row], report: Callable[[dict[str, Found]], str]
) -> dict[str, Found]:
    """In the process of a row that row alone; else the rows that are asked for, by name, whose report is printed and
    kept beside them."""
    if options.row:
        row = next(row for row in planned if row.name == options.row)
        run_here(row, options.device, options.folder / f"{row.name}.json")
        return {}
    wanted = [row for row in planned if row.name.startswith(tuple(options.only))]
    found = run_all(module, wanted, options.folder, passed_on(options), options.minutes)
    text = report(found)
    (options.folder / f"{module.rpartition('.')[2]}.md").write_text(text)
    print(text)
    return found


def conditions_of(found: dict[str, Found]) -> str:
    told: Found = next((one["conditions"] for one in found.values() if "conditions" in one), {})
    return f"Conditions: {json.dumps(told)}\n"
