"""Rows of the smoke run that hold one vLLM engine: the learner trains two policies, then the engine takes its place.

Each policy is delivered as a run does it, with the run's own proof (rollout.delivery): a policy that does not arrive
fails the row. Both sides sit in one process, one after the other, so a small model is enough of a test.
"""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.gpu.model import group
from benchmarks.gpu.rows import Found
from cluster.actor import Shared
from cluster.memory.shape import Shape
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig
from learner.trainer.trainer import Trainer
from rollout.delivery import Answer, Evidence, Push, check_digest
from rollout.engine import EngineSettings
from rollout.types import Adapter, Sampling, Weights
from rollout.vllm.engine import VllmEngine

MIB = 2**20
PROBE = 64  # tokens
# Two answers of one engine to one probe may differ by so much: vLLM's LoRA kernels add in no fixed order. A lost
# adapter changes them by 0.27 (moved_rms).
SAME_NATS = 0.1
LONG = 1000  # tokens of completions that go on while a policy arrives


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row runs. model: folder of a model of `shape`; lengths: tokens of prompt and completion."""

    device: str
    model: Path
    shape: Shape
    lengths: tuple[int, int]

    @property
    def on_card(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.on_card else "float32"

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
            "model": str(self.model),
            "dtype": self.dtype,
            "max_model_len": sum(self.lengths),
            "kv_cache_bytes": self.kv_bytes,
            "max_num_seqs": 64,
            "max_lora_rank": 16,
            "adapter_window": 3,
            "seed": 0,
        }
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
        temperature=1.0,
        max_completion_length=place.lengths[1],
        total_steps=10,
        seed=0,
        device=place.device,
        memory_bytes=memory_bytes,
    )


def made_up(place: Place, seed: int, completions: int) -> pa.Table:
    """A group of completions of full length."""
    return group(seed, place.lengths[0], [place.lengths[1]] * completions, place.shape.vocab)


def forget(place: Place) -> None:
    """What the caller has let go of, the card gets back."""
    gc.collect()
    if place.on_card:
        torch.cuda.empty_cache()


async def trained(place: Place, *, base: str = "none", push: str = "adapter") -> tuple[list[int], list[Sent]]:
    """The probe's tokens, and two policies, each an optimizer step further; the learner's memory is free again."""
    trainer = learner_of(place, base=base, push=push)
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
        """The engine's answer. Raises DeliveryError if the policy did not arrive."""
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


async def deliver(place: Place, *, base: str = "none", push: str = "adapter", **changes: Any) -> Found:
    """Start, two pushes with their proofs, and completions whose logprobs the engine's own probe repeats."""
    ids, sent = await trained(place, base=base, push=push)
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
        "freed_bytes": awake - asleep,
        "asleep_bytes": asleep,
        "sleep_s": slept - started,
        "wake_s": woken - slept,
        "changed_nats": changed,
        "changed_without_sleep_nats": without,
    }


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
