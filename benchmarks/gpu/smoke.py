"""The first ten minutes on a card: whether each part of the CUDA route works, and how far off the memory plan is.

    make smoke                                                        the same rows as tests, with a verdict each
    PYTHONPATH=. python -m benchmarks.gpu.smoke                       without pytest
    PYTHONPATH=. python -m benchmarks.gpu.smoke --device cpu --tiny   the rehearsal: what a CPU can do of it

A model with the shape of Qwen2.5-0.5B and random weights is made on the card; nothing is downloaded. Each row is a
process of its own and a JSON under benchmarks/results/gpu/<card>-<date>/; rows that are there are not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.common import as_table
from benchmarks.gpu import smoke_engine, system
from benchmarks.gpu.command_line import options_of, passed_on
from benchmarks.gpu.rows import Found, Missing, Row, run_all, run_here
from benchmarks.gpu.smoke_engine import Place
from benchmarks.gpu.smoke_kernels import compare
from cluster.memory.shape import GB, SHAPES
from rollout.vllm.arguments import check_can_continue
from rollout.vllm.environment import required_env

MINUTES = 9.5
MODULE = "benchmarks.gpu.smoke"


def rows(options: argparse.Namespace) -> list[Row]:
    """What is most in doubt first. Three whole runs by learner.main; the others hold one role in their own process."""
    engine, run = partial(_engine, options), partial(_run, options)
    return [
        Row("smoke-engine", partial(engine, smoke_engine.deliver, "", {})),
        Row("smoke-slices", partial(run, [*system.SLICES, "memory.device=24GiB"], "")),
        Row("smoke-kernels", partial(_kernels, options)),
        Row("smoke-shared", partial(run, [*system.SLICES, "memory.device=24GiB", "memory.layout=shared"], "")),
        Row("smoke-sleep", partial(engine, smoke_engine.sleep_and_wake, "card", {})),
        Row("smoke-merged", partial(engine, smoke_engine.deliver, "", {"push": "merged", "max_lora_rank": 0})),
        Row("smoke-nf4", partial(engine, smoke_engine.deliver, "card and bitsandbytes", {"base": "nf4"})),
        Row("smoke-continue", partial(engine, smoke_engine.replace_in_flight, "versions", {})),
        Row("smoke-fp8", partial(engine, smoke_engine.deliver, "fp8", {"kv_cache_dtype": "fp8"})),
        Row("smoke-oom", partial(engine, smoke_engine.run_out_of_memory, "card", {})),
        Row("smoke-alternating", partial(run, [*system.TURNS, "memory.device=24GiB"], "card")),
    ]


def _engine(
    options: argparse.Namespace,
    work: Callable[..., Awaitable[Found]],
    needs: str,
    changes: dict[str, Any],
    device: str,
) -> Found:
    _check(needs, device)
    shape, lengths = (system.TINY, (48, 48)) if options.tiny else (SHAPES["Qwen2.5-0.5B"], (256, 512))
    place = Place(device, system.model(options, shape).absolute(), shape, lengths)

    async def done() -> Found:
        return await work(place, **changes)

    return asyncio.run(done())


def _run(options: argparse.Namespace, settings: list[str], needs: str, device: str) -> Found:
    _check(needs, device)
    if device == "cpu":  # which has no slices: two processes
        shared = [setting for setting in settings if setting.startswith("memory.layout")]
        settings = ["memory.device=3GiB", "model.dtype=float32", *shared]
    shape = system.TINY if options.tiny else SHAPES["Qwen2.5-0.5B"]
    return system.system(options, shape, 3 if options.tiny else 6, settings, device)


def _kernels(options: argparse.Namespace, device: str) -> Found:
    return compare(*((system.TINY, 256) if options.tiny else (SHAPES["Qwen2.5-0.5B"], 4096)), device)


def _check(needs: str, device: str) -> None:
    """Raises Missing for what this machine cannot do."""
    if "card" in needs and device == "cpu":
        raise Missing("needs a card")
    if "bitsandbytes" in needs and find_spec("bitsandbytes") is None:
        raise Missing("bitsandbytes is not installed")
    if needs == "versions":
        try:
            check_can_continue()
        except ValueError as error:
            raise Missing(str(error)) from error
    if needs == "fp8" and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise Missing("fp8 needs compute capability 8.9")
    if needs == "fp8" and device == "cpu" and torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise Missing("fp8 on a CPU needs AVX-512")


def run_rows(options: argparse.Namespace, wanted: list[Row]) -> dict[str, Found]:
    """Those that are there afterwards, by name."""
    os.environ.update(required_env(cuda=options.device == "cuda"))  # of the rows' processes, before they import torch
    passed = passed_on(options)
    return run_all(MODULE, wanted, options.folder, passed, options.minutes)


def report(found: dict[str, Found]) -> str:
    """A table with a row each; of whole runs what was measured against what was planned."""
    lines = []
    for name, one in found.items():
        told = _figures(one) if one["status"] == "ok" else [last_line(one)[:300]]
        lines.append([name, one["status"], f"{one.get('seconds', 0):.0f}", ", ".join(told).replace("|", "/")])
    conditions: Found = next((one["conditions"] for one in found.values() if "conditions" in one), {})
    table = as_table(["row", "verdict", "s", "figures"], lines)
    return f"## Smoke run\n\n{table}\n\nConditions: {json.dumps(conditions)}\n"


def last_line(one: Found) -> str:
    """What a row that is not ok said at last."""
    error: str | list[str] = one["error"]
    return error if isinstance(error, str) else error[-1] if error else "no word"


def _figures(one: Found) -> list[str]:
    told = [f"{key} {_figure(key, value)}" for key, value in one.items() if _is_figure(key, value)]
    plans = {role: one["plan"][role] for role in ("learner", "generator")} if "plan" in one else {}
    return told + [
        f"{role} {plan['measured'] / GB:.2f} GB of {plan['planned'] / GB:.2f} planned" for role, plan in plans.items()
    ]


def _is_figure(key: str, value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return key != "seconds" and (number or (isinstance(value, list) and key.endswith("rms")))


def _figure(key: str, value: Any) -> str:
    if isinstance(value, list):
        return " ".join(f"{part:.2g}" for part in value)
    return f"{value / GB:.2f} GB" if key.endswith("_bytes") else f"{value:.4g}"


def main() -> int:
    options = options_of(__doc__, MINUTES)
    planned = rows(options)
    if options.row:
        row = next(row for row in planned if row.name == options.row)
        run_here(row, options.device, options.folder / f"{row.name}.json")
        return 0
    found = run_rows(options, [row for row in planned if row.name.startswith(tuple(options.only))])
    text = report(found)
    (options.folder / "smoke.md").write_text(text)
    print(text)
    return 0 if all(one["status"] == "ok" or options.device == "cpu" for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
