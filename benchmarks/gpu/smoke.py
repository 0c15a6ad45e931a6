"""The first ten minutes on a card: whether each part of the CUDA route works, and how far off the memory plan is.

    make smoke                                                        the same rows as tests, with a verdict each
    PYTHONPATH=. python -m benchmarks.gpu.smoke                       without pytest
    PYTHONPATH=. python -m benchmarks.gpu.smoke --device cpu --tiny   the rehearsal: what a CPU can do of it

A model with the shape of Qwen2.5-0.5B and random weights is made on the card; nothing is downloaded. Each row is a
process of its own and a JSON under benchmarks/results/gpu/<card>-<date>/; rows that are there are not run again.

In rows that hold one vLLM engine the learner trains two policies, then the engine takes its place. Each policy is
delivered as a run does it, with the run's own proof (rollout.delivery): a policy that does not arrive fails the row.
Both sides sit in one process, one after the other, so a small model is enough of a test.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import MIB, as_table, relative_error
from benchmarks.gpu import system
from benchmarks.gpu.model import group
from benchmarks.gpu.rows import Found, Missing, Row, conditions_of, measured, options_of, passed_on, run_all
from cluster.actor import Shared
from cluster.memory.shape import ATTENTION, EXPERTS, GB, SHAPES, Shape
from examples.quantised_checkpoints import make_gpt_oss, make_quantised
from examples.random_families import make_family
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig
from learner.model.fusion import fuse
from learner.trainer.trainer import Trainer
from rollout.data.model_files import CONFIG, read_json
from rollout.delivery import Answer, Evidence, Push, check_digest
from rollout.engine import EngineSettings
from rollout.types import Adapter, Sampling, Weights
from rollout.vllm.arguments import check_can_continue
from rollout.vllm.engine import VllmEngine
from rollout.vllm.environment import required_env

MINUTES = 9.5
MODULE = "benchmarks.gpu.smoke"
PROBE = 64  # tokens
# Two answers of one engine to one probe may differ by so much: vLLM's LoRA kernels add in no fixed order. A lost
# adapter changes them by 0.27 (moved_rms).
SAME_NATS = 0.1
LONG = 1000  # tokens of completions that go on while a policy arrives
LAYERS, TURNS = 4, 10  # of the kernels' row
# Formats of quantised checkpoints -> what they need (rollout.quantised.check_kernel).
QUANTISED = {
    "w4a16": "", "gptq": "", "awq": "", "fp8_channel": "card and fp8", "fp8_block": "card and fp8", "mxfp4": "card",
}  # fmt: skip
WORSE = 1.2  # a random direction of rounding


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row runs. model: folder of a model of `shape`; lengths: tokens of prompt and completion; dtype: that of
    weights and adapters."""

    device: str
    model: Path
    shape: Shape
    lengths: tuple[int, int]
    dtype: str

    @property
    def on_card(self) -> bool:
        return self.device == "cuda"

    @property
    def kv_bytes(self) -> int:
        return (2048 if self.on_card else 64) * MIB

    def used(self) -> int:
        """Bytes of the card that are taken, by whomever; 0 on a CPU."""
        if not self.on_card:
            return 0
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def engine(self, **changes: Any) -> VllmEngine:
        settings: dict[str, Any] = {
            "model": str(self.model), "dtype": self.dtype, "max_model_len": sum(self.lengths),
            "kv_cache_bytes": self.kv_bytes, "max_num_seqs": 64, "max_lora_rank": 16, "adapter_window": 3, "seed": 0,
        }  # fmt: skip
        return VllmEngine(EngineSettings(**settings | changes))


@dataclass(frozen=True, slots=True)
class Sent:
    """A policy as the learner sends it, and its own answer to the probe."""

    policy: Adapter | Weights
    answer: Answer


def learner_of(place: Place, *, base: str = "none", memory_bytes: int | None = None, **learner: Any) -> Trainer:
    return Trainer(
        ModelConfig.model_validate({"path": str(place.model), "dtype": place.dtype, "base": base}),
        LearnerConfig.model_validate({"learning_rate": 1e-3, "schedule": {"warmup": 0.0}} | learner),
        temperature=1.0, max_completion_length=place.lengths[1], total_steps=10, seed=0, device=place.device,
        memory_bytes=memory_bytes,
    )  # fmt: skip


def made_up(place: Place, seed: int, completions: int) -> pa.Table:
    """A group of completions of full length."""
    return group(seed, place.lengths[0], [place.lengths[1]] * completions, place.shape.vocab)


def forget(place: Place) -> None:
    """What the caller has let go of, the card gets back."""
    gc.collect()
    if place.on_card:
        torch.cuda.empty_cache()


async def trained(place: Place, *, base: str = "none", **learner: Any) -> tuple[list[int], list[Sent]]:
    """The probe's tokens, and two policies, each an optimizer step further; the learner's memory is free again."""
    trainer = learner_of(place, base=base, **learner)
    ids = np.random.default_rng(1).integers(0, place.shape.vocab, PROBE).tolist()
    sent = []
    for step in range(2):
        await trainer.step([made_up(place, step, completions=4)])
        policy = (await trainer.outgoing())[0].value
        assert isinstance(policy, Adapter | Weights), "it is in this process"
        sent.append(Sent(policy, await trainer.probe(ids)))
    del trainer
    forget(place)
    return ids, sent


class Delivery:
    """Policies into one engine, each proven. seconds: of each load; differences: of the two answers, rms in nats."""

    def __init__(self, engine: VllmEngine, ids: list[int], dtype: str) -> None:
        self.seconds: list[float] = []
        self.differences: list[float] = []
        self._engine, self._ids, self._dtype = engine, ids, dtype
        self._evidence = Evidence()

    async def of(self, sent: Sent) -> Answer:
        """The engine's answer. Raises RuntimeError if the policy did not arrive."""
        expected: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        expected.set_result(sent.answer)
        push = Push(Shared(sent.policy), sent.policy.policy_id, tuple(self._ids), expected, self._dtype)
        load = self._engine.load_adapter if isinstance(sent.policy, Adapter) else self._engine.load_weights
        started = time.perf_counter()
        check_digest(sent.policy, "engine", await load(sent.policy))  # type: ignore[arg-type]
        self.seconds.append(time.perf_counter() - started)
        answer = Answer(await self._engine.probe(self._ids), await self._engine.held(), 0.0)
        await push.verify("engine", answer, self._evidence)
        self.differences.append(rms(answer.logprobs - sent.answer.logprobs))
        return answer


def rms(values: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


async def deliver(
    place: Place, *, base: str = "none", push: str = "adapter", lora: Found | None = None, **changes: Any
) -> Found:
    """Start, two pushes with their proofs, and completions whose logprobs the engine's own probe repeats. lora: of the
    learner's settings; changes: of the engine's."""
    ids, sent = await trained(place, base=base, push=push, lora=lora or {})
    before, started = place.used(), time.perf_counter()
    engine = place.engine(base=base, **changes)
    start_s, taken = time.perf_counter() - started, place.used() - before
    delivery = Delivery(engine, ids, "fp8" if changes.get("kv_cache_dtype") == "fp8" else place.dtype)
    for one in sent:
        await delivery.of(one)
    prompt, sampling = ids[: place.lengths[0]], Sampling(n=16, max_tokens=place.lengths[1])
    await engine.generate(prompt, sampling)
    started = time.perf_counter()
    completions = await engine.generate(prompt, sampling)
    seconds = time.perf_counter() - started
    again = await engine.probe([*prompt, *completions[0].token_ids.tolist()][:-1])
    await engine.close()
    own = completions[0].logprobs[:-1] - again[len(prompt) - 1 :]
    return {
        "start_s": start_s,
        "taken_bytes": taken,
        "kv_bytes": place.kv_bytes,
        "push_s": min(delivery.seconds),
        "probe_rms": delivery.differences,
        "moved_rms": rms(sent[1].answer.logprobs - sent[0].answer.logprobs),
        "decode_against_prefill_rms": rms(own),
        "tokens_per_s": sum(len(one.token_ids) for one in completions) / seconds,
    }


async def deliver_quantised(place: Place, *, kind: str) -> Found:
    """What `deliver` does, on a tiny random checkpoint with quantised weights. 256 is meant as a width that vLLM's
    kernels for cards take."""
    folder, wide = place.model.parent / f"quantised-{kind}", 256
    if kind == "mxfp4":
        make_gpt_oss(folder, hidden_size=wide, intermediate_size=wide)
    else:
        make_quantised(folder, kind, hidden_size=wide)
    shape = Shape.from_config(read_json(str(folder), CONFIG), kind)
    return await deliver(replace(place, model=folder, shape=shape, lengths=(PROBE, PROBE), dtype="bfloat16"))


async def deliver_experts(place: Place, *, family: str) -> Found:
    """What `deliver` does, with an adapter of the attention and of all experts that is not merged, on a tiny random
    model. vLLM holds gpt-oss's pairs of gate and up projection as they are sent, and Qwen3-MoE's taken apart."""
    targets = (*ATTENTION, EXPERTS)
    folder = make_family(place.model.parent / f"experts-{family}", family)
    shape = Shape.from_config(read_json(str(folder), CONFIG), family)
    there = replace(place, model=folder, shape=shape, lengths=(PROBE, PROBE))
    return await deliver(there, lora={"targets": list(targets)}, lora_targets=targets)


async def sleep_and_wake(place: Place) -> Found:
    """Bytes that sleep gives back, seconds of both ways, and the same answer afterwards."""
    ids, sent = await trained(place)
    engine = place.engine(sleeps=True)
    before = await Delivery(engine, ids, place.dtype).of(sent[1])
    again = await engine.probe(ids)
    awake, started = place.used(), time.perf_counter()
    await engine.sleep()
    asleep, slept = place.used(), time.perf_counter()
    await engine.wake()
    woken = time.perf_counter()
    after = await engine.probe(ids)
    await engine.close()
    changed, without = (float(np.abs(one - before.logprobs).max()) for one in (after, again))
    if changed > SAME_NATS or awake - asleep < place.kv_bytes:
        raise RuntimeError(f"sleep gave back {awake - asleep} bytes; the answer after wake differs by {changed} nats")
    return {
        "freed_bytes": awake - asleep, "asleep_bytes": asleep, "sleep_s": slept - started, "wake_s": woken - slept,
        "changed_nats": changed, "changed_without_sleep_nats": without,
    }  # fmt: skip


async def replace_in_flight(place: Place) -> Found:
    """A push between two steps of running completions: tokens of both versions, each with its label."""
    ids, sent = await trained(place)
    engine = place.engine(in_flight="continue", adapter_window=1, max_model_len=LONG + 16)
    delivery = Delivery(engine, ids, place.dtype)
    await delivery.of(sent[0])
    running = asyncio.create_task(engine.generate(ids[:16], Sampling(n=16, max_tokens=LONG)))
    await asyncio.sleep(0.2)  # of the seconds that it takes
    await delivery.of(sent[1])
    completions = await running
    await engine.close()
    share = float(np.mean(np.concatenate([one.versions for one in completions]) == sent[1].policy.version))
    if not 0 < share < 1:
        raise RuntimeError(f"of the tokens {share:.0%} have the newer version; some and not all should")
    return {"push_s": delivery.seconds[1], "probe_rms": delivery.differences, "tokens_of_newer": share}


async def run_out_of_memory(place: Place) -> Found:
    """A step with a cap that its token budget breaks: taken again with smaller micro-batches, to the same loss."""
    one, groups = sum(place.lengths), [made_up(place, 0, completions=16)]
    small = learner_of(place, checkpointing="none", token_budget=one)
    wanted = (await small.step(groups))["loss/total"]
    peak = (await small.step(groups))["memory/learner_peak"]  # with the optimizer's states
    del small
    forget(place)
    tight = learner_of(place, checkpointing="none", token_budget=16 * one, memory_bytes=int(1.3 * peak))
    metrics = await tight.step(groups)
    retries, budget, loss = (metrics[key] for key in ("memory/oom_retries", "memory/token_budget", "loss/total"))
    if retries < 1 or abs(loss - wanted) > 1e-2 * max(abs(wanted), 1.0):
        raise RuntimeError(f"{retries:.0f} retries, at least one was wanted; loss {loss}, with a small budget {wanted}")
    return {"cap_bytes": int(1.3 * peak), "retries": retries, "token_budget": budget, "loss": loss, "wanted": wanted}


def compare(shape: Shape, tokens: int, device: str) -> Found:
    """The learner's fused operations against transformers' own, values and time: the gradient of four layers of the
    shape in bfloat16, by both ways, against the same in float32. What the fused operations round they round less often,
    so their error may not be larger. Raises AssertionError if it is."""
    config = AutoConfig.for_model(**replace(shape, layers=LAYERS).to_config())
    ids = torch.randint(shape.vocab, (1, tokens), device=device, generator=torch.Generator(device).manual_seed(0))

    def model(dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).eval()

    plain, fused, exact = model(torch.bfloat16), model(torch.bfloat16), model(torch.float32)
    exact.load_state_dict(plain.state_dict())  # the rounded weights
    fuse(fused, lambda: fused.model(ids[:, :8]), on_card=device == "cuda")
    wanted = _gradient(exact, ids)
    errors = [relative_error(_gradient(one, ids), wanted) for one in (plain, fused)]
    seconds = [min(_kernel_seconds(one, ids, device) for _ in range(TURNS)) for one in (plain, fused)]
    assert errors[1] <= WORSE * errors[0], f"gradient: fused {errors[1]:.2e} from float32, plain {errors[0]:.2e}"
    return {"plain_error": errors[0], "fused_error": errors[1], "times_as_fast": seconds[0] / seconds[1]}


def _gradient(lm: Any, ids: Tensor) -> Tensor:
    """Of all weights, one below the other, in float64."""
    states = lm.model(ids, use_cache=False).last_hidden_state
    slopes = torch.autograd.grad(states.float().square().mean(), list(lm.model.parameters()))
    return torch.cat([slope.double().flatten() for slope in slopes])


def _kernel_seconds(lm: Any, ids: Tensor, device: str) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    lm.model(ids, use_cache=False).last_hidden_state.square().mean().backward()
    wait()
    return time.perf_counter() - started


def rows(options: argparse.Namespace) -> list[Row]:
    """What is most in doubt first. Three whole runs by learner.main; the others hold one role in their own process."""
    engine, run = partial(_engine, options), partial(_run, options)
    return [
        Row("smoke-engine", partial(engine, deliver, "", {})),
        Row("smoke-slices", partial(run, [*system.SLICES, "memory.device=24GiB"], "")),
        Row("smoke-kernels", partial(_kernels, options)),
        Row("smoke-shared", partial(run, [*system.SLICES, "memory.device=24GiB", "memory.layout=shared"], "")),
        Row("smoke-sleep", partial(engine, sleep_and_wake, "card", {})),
        Row("smoke-merged", partial(engine, deliver, "", {"push": "merged", "max_lora_rank": 0})),
        Row("smoke-nf4", partial(engine, deliver, "card and bitsandbytes", {"base": "nf4"})),
        Row("smoke-continue", partial(engine, replace_in_flight, "versions", {})),
        Row("smoke-fp8", partial(engine, deliver, "fp8", {"kv_cache_dtype": "fp8"})),
        *(
            Row(f"smoke-{kind}", partial(engine, deliver_quantised, needs, {"kind": kind}))
            for kind, needs in QUANTISED.items()
        ),
        *(
            Row(f"smoke-experts_{family}", partial(engine, deliver_experts, "card", {"family": family}))
            for family in ("qwen3_moe", "gpt_oss")
        ),
        Row("smoke-oom", partial(engine, run_out_of_memory, "card", {})),
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
    dtype = "float32" if device == "cpu" else "bfloat16"
    place = Place(device, system.model(options, shape).absolute(), shape, lengths, dtype)

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
    if "fp8" in needs and device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise Missing("fp8 needs compute capability 8.9")
    if "fp8" in needs and device == "cpu" and torch.backends.cpu.get_cpu_capability() != "AVX512":
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
    table = as_table(["row", "verdict", "s", "figures"], lines)
    return f"## Smoke run\n\n{table}\n\n{conditions_of(found)}"


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
    os.environ.update(required_env(cuda=options.device == "cuda"))  # of the rows' processes, before they import torch
    found = measured(MODULE, options, rows(options), report)
    return 0 if all(one["status"] == "ok" or options.device == "cpu" for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
