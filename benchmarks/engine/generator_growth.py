"""Whether a generator grows: one in this process, asked for what the demo asks of it, step after step.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.generator_growth [--steps 10000] [--kernels 1024]

A step is four groups of eight completions, whole weights that arrive and are proven by a probe, and in each tenth an
evaluation of 96 problems. Resident memory is the process's own (Private_Clean and Private_Dirty). --kernels: how many
of its kernels oneDNN keeps (its own default is 1024).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import os
import re
import time
from pathlib import Path
from typing import Any

from rollout.vllm.environment import required_env

KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
MODEL = "examples/tiny-arithmetic"
GROUPS, GENERATIONS, LENGTH, EVERY = 4, 8, 64, 10


def own_mib() -> float:
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(found) for found in re.findall(r"^Private_(?:Clean|Dirty):\s+(\d+)", text, re.MULTILINE)) / 1024


async def measured(steps: int, look_every: int) -> list[dict[str, float]]:
    import torch
    from safetensors.torch import load_file

    from learner.driver import config_io
    from learner.driver.evaluate import greedy
    from learner.driver.preflight import prepare
    from learner.driver.processes import worker_spec
    from rollout.safetensors_stream import Source
    from rollout.types import Sampling
    from rollout.weights_file import WeightsFile
    from rollout.worker import RolloutWorker

    prepared: Any = await asyncio.to_thread(lambda: prepare(config_io.load("configs/local_cpu.yaml", ["name=grows"])))
    spec = dataclasses.replace(worker_spec(prepared.config, 0, prepared.budgets), rewards=())
    worker: Any = await asyncio.to_thread(RolloutWorker, spec)
    base = {name: weight.float() for name, weight in load_file(f"{MODEL}/model.safetensors").items()}
    file, found, begun = WeightsFile(), [], time.monotonic()
    for step in range(steps + 1):
        torch.manual_seed(step)
        moved = {name: Source.of(weight + 1e-3 * torch.randn_like(weight)) for name, weight in base.items()}
        await worker.take_policy(file.pack(step, moved, torch.float32))
        await worker.probe(list(range(3, 67)))
        first = GROUPS * step
        await asyncio.gather(
            *(
                worker.rollout(prepared.problems.at(at), Sampling(GENERATIONS, LENGTH, 1.0, GENERATIONS * at), 0)
                for at in range(first, first + GROUPS)
            )
        )
        if step % EVERY == 0:
            for start in range(0, 96, 16):
                some = prepared.heldout[start : start + 16]
                await worker.rollouts(some, [greedy(prepared.config)] * len(some), 0)
        if step % look_every == 0:
            gc.collect()
            found.append({"step": step, "mib": own_mib(), "seconds": time.monotonic() - begun})
            print(f"step {step}: {found[-1]['mib']:.0f} MiB, {found[-1]['seconds']:.0f} s", flush=True)
    await worker.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500, help="steps from one look to the next")
    parser.add_argument("--kernels", type=int, default=None)
    options = parser.parse_args()
    os.environ |= required_env(cuda=False)  # before anything imports torch
    if options.kernels is not None:
        os.environ[KERNELS] = str(options.kernels)
    found = asyncio.run(measured(options.steps, options.every))
    from benchmarks.common import as_table, as_text, conditions, save  # here: it imports torch

    told = conditions()
    rows = [[f"{one['step']:.0f}", f"{one['mib']:.0f}"] for one in found]
    middle = min(found, key=lambda one: abs(one["step"] - options.steps / 2))
    text = (
        f"# A generator of the demo over {options.steps} steps, where oneDNN keeps {os.environ[KERNELS]} kernels\n\n"
        f"{as_table(['step', 'MiB of its own'], rows)}\n\nFrom step {middle['step']:.0f} to {found[-1]['step']:.0f}: "
        f"{found[-1]['mib'] - middle['mib']:+.1f} MiB.\n\nConditions: {as_text(told)}\n"
    )
    save(f"generator_growth_{os.environ[KERNELS]}", {"conditions": told, "found": found}, text)


if __name__ == "__main__":
    main()
