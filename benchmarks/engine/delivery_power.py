"""How often a policy that did not arrive is noticed, and how often one that did is suspected.

    PYTHONPATH=. .venv/bin/python -m benchmarks.engine.delivery_power [--trials 200] [--pushes 1120]

For each type (float32; bfloat16; fp8: bfloat16 with keys and values in fp8) and learning rate, on a tiny model: a real
vLLM engine, a real trainer whose optimizer makes a real step for each version, on completions that the engine sampled.
A push is checked with what a run checks it with (rollout.delivery.Push), in three measurements:

    false alarms   the adapter is loaded; each push counts
    frozen         vLLM loads it as always, lists it, and reports its digest, but its layers keep the tensors they have:
                   is that push, the first undelivered one, noticed? Only pushes that change a bit are trials; the next
                   one arrives again
    lying          what if such an engine also told of its tensors what the learner wants to hear: how many versions
                   until its answers give it away? Frozen at version f it goes on answering as at f (that it does, to
                   the bit, is counted at each frozen push). Trials begin at every second version of a stretch of
                   STRETCH versions on the same probe tokens, and are followed for FOLLOWED
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from benchmarks.common import as_table, conditions, parser_of, save, under
from rollout.vllm.environment import required_env

T = TypeVar("T")

# -> type of weights and activations, type of keys and values
TYPES = {"float32": ("float32", "auto"), "bfloat16": ("bfloat16", "auto"), "fp8": ("bfloat16", "fp8")}
GROUPS, COMPLETIONS, LENGTH, PROMPT = 1, 4, 48, 16
BATCHES = 8  # of recorded groups; their rewards are drawn anew for each step
RATES = (1e-6, 1e-5, 1e-4)
STRETCH, FOLLOWED = 64, 32  # versions


class Cell:
    """An engine, a trainer and its recorded completions, for one type and learning rate."""

    def __init__(self, folder: Path, kind: str, rate: float) -> None:
        from examples.random_model import make_tiny_model
        from learner.config import ModelConfig
        from learner.config.settings import LearnerConfig, LoraConfig, ScheduleConfig
        from learner.trainer.trainer import Trainer
        from rollout.engine import EngineSettings
        from rollout.vllm.engine import VllmEngine

        dtype, cache = TYPES[kind]
        path = str(make_tiny_model(folder))
        self.kind, self.random = kind, np.random.default_rng(0)
        self.seconds: dict[str, list[float]] = {}
        self._made: dict[tuple[int, int, tuple[int, ...]], pa.Table] = {}
        settings = EngineSettings(
            path, dtype, max_model_len=256, kv_cache_bytes=32 << 20, max_num_seqs=64, max_lora_rank=8,
            adapter_window=1, seed=1, kv_cache_dtype=cache, in_flight="continue",
        )  # fmt: skip
        self.engine: Any = VllmEngine(settings)
        learner = LearnerConfig(
            learning_rate=rate, lora=LoraConfig(rank=8, alpha=16), schedule=ScheduleConfig(warmup=0.0)
        )
        self.trainer = Trainer(
            ModelConfig.model_validate({"path": path, "dtype": dtype}), learner, temperature=1.0,
            max_completion_length=LENGTH, total_steps=10**6, seed=0, device="cpu",
        )  # fmt: skip

    async def record(self) -> None:
        """What the trainer learns from: groups that the engine samples under the first policy."""
        from rollout.types import Sampling

        await self.engine.load_adapter((await self.trainer.outgoing())[0].value)
        self.batches: list[list[tuple[list[int], Any]]] = []
        for batch in range(BATCHES):
            prompts = [[int(token) for token in self.random.integers(40, 120, PROMPT)] for _ in range(GROUPS)]
            seeds = [1000 * batch + 100 * group for group in range(GROUPS)]
            self.batches.append(
                [(p, await self.engine.generate(p, Sampling(COMPLETIONS, LENGTH, seed=s)))
                 for p, s in zip(prompts, seeds, strict=True)]
            )  # fmt: skip

    def groups(self, version: int) -> list[pa.Table]:
        """Half of the completions of a group are rewarded, which ones is drawn anew."""
        batch = version % BATCHES
        wins = [tuple(sorted(self.random.permutation(COMPLETIONS)[: COMPLETIONS // 2].tolist())) for _ in range(GROUPS)]
        return [self._group(batch, position, won) for position, won in enumerate(wins)]

    def _group(self, batch: int, position: int, won: tuple[int, ...]) -> pa.Table:
        from rollout.fakes import make_group

        key = (batch, position, won)
        if key not in self._made:
            prompt, completions = self.batches[batch][position]
            rewards, prompts = [float(j in won) for j in range(COMPLETIONS)], [prompt] * COMPLETIONS
            self._made[key] = make_group(position, completions=completions, prompt_ids=prompts, rewards=rewards)
        return self._made[key]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within it vLLM's layers keep the tensors they have, whatever is loaded."""
        (worker,) = self.engine._thread._turns.engine.collective_rpc(lambda worker: worker)
        layers = list(worker.model_runner.lora_manager._adapter_manager.modules.values())
        for layer in layers:
            layer.set_lora = layer.reset_lora = lambda *_, **__: None
        yield
        for layer in layers:
            del layer.set_lora, layer.reset_lora

    async def timed(self, what: str, work: Awaitable[T]) -> T:
        started = time.perf_counter()
        result = await work
        self.seconds.setdefault(what, []).append(time.perf_counter() - started)
        return result


@dataclass
class Liar:
    """An engine that is frozen at a version, and what has been noticed of it by now."""

    since: int
    answer: Any
    evidence: Any
    caught: int | None = None  # versions after it froze


@dataclass
class Tally:
    """What one cell comes to."""

    pushes: int = 0
    alarms: dict[str, int] = field(default_factory=lambda: {"tensors": 0, "logprobs": 0, "evidence": 0})
    frozen: int = 0
    noticed: int = 0
    repeated: int = 0  # frozen pushes whose answer was that of the push before, to the bit
    unchanged: int = 0  # steps that changed no bit of the adapter
    lags: list[int | None] = field(default_factory=list)  # versions until a liar is caught; None: not in FOLLOWED
    seconds: dict[str, list[float]] = field(default_factory=dict)


def objects(check: Callable[..., None], *what: Any) -> int:
    """1 if the check raises."""

    try:
        check("generator-0", *what)
    except RuntimeError:
        return 1
    return 0


async def measure(cell: Cell, trials: int, pushes: int) -> Tally:
    """Every fifth push is frozen until there are enough of them."""
    from cluster.actor import Shared
    from learner.driver.loop import Probe
    from rollout.delivery import Evidence, Push, check_digest

    await cell.record()
    tally, evidence, liars = Tally(seconds=cell.seconds), Evidence(), list[Liar]()
    payload, version, answer = b"", 0, None
    while tally.pushes < pushes or tally.frozen < trials:
        version += 1
        groups = cell.groups(version)
        await cell.trainer.step(groups)
        if version % STRETCH == 1:
            probe, answer = Probe(cell.batches[0][0][0], 256), None
            probe.trained_on(groups, settled=True)
            tally.lags += [liar.caught for liar in liars]
            liars = []
        update: Any = (await cell.trainer.outgoing())[0].value
        expected = await cell.timed("learner's answer", cell.trainer.probe(list(probe.ids)))
        told: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        told.set_result(expected)
        push = Push(Shared(update), update.policy_id, probe.ids, told, cell.kind)
        changed, payload = update.payload != payload, update.payload
        tally.unchanged += not changed
        if version % 5 == 0 and changed and answer is not None and tally.frozen < trials:
            with cell.frozen():
                check_digest(update, "generator-0", await cell.engine.load_adapter(update))
            tally.frozen += 1
            tally.noticed += objects(push.check_held, await cell.engine.held(), expected.held)
            tally.repeated += bool(np.array_equal(answer, await cell.engine.probe(probe.ids)))
        else:
            await cell.timed("load", cell.engine.load_adapter(update))
            held = await cell.timed("read back", cell.engine.held())
            answer = await cell.timed("probe", cell.engine.probe(probe.ids))
            tally.pushes += 1
            tally.alarms["tensors"] += objects(push.check_held, held, expected.held)
            tally.alarms["logprobs"] += objects(push.check_logprobs, answer, expected.logprobs)
            tally.alarms["evidence"] += objects(push.check_movement, answer, expected.logprobs, evidence)
            if version % 2 == 1 and version % STRETCH <= STRETCH - FOLLOWED:
                liars.append(Liar(version, answer, Evidence()))
        for liar in liars:
            if liar.caught is None and version - liar.since <= FOLLOWED:
                found = objects(push.check_movement, liar.answer, expected.logprobs, liar.evidence)
                liar.caught = version - liar.since if found else None
    return tally


def run(kind: str, rate: float, trials: int, pushes: int, keep: Path) -> Tally:
    """In a process of its own. What it finds is kept, and taken from there by the next run."""
    path = keep / f"{kind}-{rate:g}.json"
    if path.exists():
        return Tally(**json.loads(path.read_text()))

    async def whole(folder: str) -> Tally:
        cell = Cell(Path(folder), kind, rate)
        try:
            return await measure(cell, trials, pushes)
        finally:
            await cell.engine.close()

    with tempfile.TemporaryDirectory() as folder:
        tally = asyncio.run(whole(folder))
    keep.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(tally)))
    return tally


def lying(lags: Sequence[int | None]) -> list[str]:
    """Median versions until a liar is caught, how many are by the first, and so on, and of how many."""
    if not lags:
        return ["-"] * 5
    caught = [lag for lag in lags if lag is not None]
    within = [f"{sum(lag <= most for lag in caught) / len(lags):.1%}" for most in (1, 8, FOLLOWED)]
    half = sorted(FOLLOWED + 1 if lag is None else lag for lag in lags)[len(lags) // 2]
    return [str(half) if half <= FOLLOWED else f"> {FOLLOWED}", *within, str(len(lags))]


def report(found: dict[tuple[str, float], Tally], told: dict[str, Any]) -> str:
    rows = [
        [kind, f"{rate:g}", f"{tally.noticed} of {tally.frozen}", f"{sum(tally.alarms.values())} of {tally.pushes}",
         *lying(tally.lags)]
        for (kind, rate), tally in found.items()
    ]  # fmt: skip
    pushes, frozen, noticed, repeated = (
        sum(getattr(tally, name) for tally in found.values()) for name in ("pushes", "frozen", "noticed", "repeated")
    )
    alarms = sum(sum(tally.alarms.values()) for tally in found.values())
    header = ["type", "learning rate", "first undelivered policy noticed", "false alarms"]
    header += ["a liar: versions, median", "caught by the 1st", "by the 8th", f"by the {FOLLOWED}th", "liars"]
    kinds = ("load", "read back", "probe", "learner's answer")
    parts = {what: [spent for tally in found.values() for spent in tally.seconds[what]] for what in kinds}
    times = ", ".join(f"{what} {1e3 * median(spent):.1f}" for what, spent in parts.items())
    return (
        "# What the proof of a delivery notices\n\n"
        f"{as_table(header, rows)}\n\n"
        f"In all {noticed} of {frozen} frozen pushes noticed, {alarms} false alarms in {pushes} pushes (with none, the "
        f"rate is below {3 / pushes:.1e} a push at 95 % confidence). {repeated} of {frozen} frozen pushes gave the "
        "probe tokens the logprobs of the push before, to the bit. A liar (frozen, and its tensors said to be those "
        "that were sent) is noticed by its answers alone. In 16 bits rounding hides small steps from those, so there "
        "it takes versions, at small rates more than were followed; the tensors do not depend on it. Steps that change "
        "no bit of the adapter leave nothing undelivered and are no trials: "
        f"{sum(tally.unchanged for tally in found.values())} here. Liars begin at every second version of stretches of "
        f"{STRETCH} on the same 64 probe tokens, so they overlap. Medians in ms, on this model: {times}.\n\n"
        "Model: Qwen2 of 0.1M random weights, LoRA of rank 8 on all layers, AdamW, "
        f"{GROUPS} x {COMPLETIONS} recorded completions a step with random rewards, cells measured one "
        "after the other. fp8: bfloat16 with keys "
        f"and values in e4m3.\n\nConditions: {under(told, 'Counts')}\n"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=200, help="frozen pushes, for each type and learning rate")
    parser.add_argument("--pushes", type=int, default=1120, help="pushes that arrive, for each; 9 x 1120 > 10,000")
    parser.add_argument("--types", nargs="+", choices=list(TYPES), default=list(TYPES))
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, default=Path("build/delivery_power"), help="where finished cells lie")
    options = parser.parse_args()
    os.environ.update(required_env(cuda=False) | {"HF_HUB_OFFLINE": "1"})
    told = conditions()
    cells = [(kind, rate) for kind in options.types for rate in options.rates]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(options.processes, maxtasksperchild=1) as pool:
        work = [(*cell, options.trials, options.pushes, options.keep) for cell in cells]
        found = dict(zip(cells, pool.starmap(run, work, chunksize=1), strict=True))
    content = {
        f"{kind} {rate:g}": {name: value for name, value in vars(tally).items() if name != "seconds"}
        | {"ms": {what: 1e3 * median(spent) for what, spent in tally.seconds.items()}}
        for (kind, rate), tally in found.items()
    }
    save("delivery_power", {"conditions": told, "cells": content}, report(found, told))


if __name__ == "__main__":
    main()
