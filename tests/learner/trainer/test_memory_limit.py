"""Memory that runs out costs time and nothing else; what cannot fit says so, in time and in numbers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.gpu.model import random_base
from cluster.memory.shape import Shape
from learner.algo.surrogates import LossConfig
from learner.config import ModelConfig
from learner.config.settings import LearnerConfig
from learner.model import policy
from learner.model.attention import VARLEN, kernels
from learner.trainer import memory_limit
from learner.trainer.memory_limit import MemoryLimit, OutOfMemory, device_of
from learner.trainer.trainer import Trainer
from tests.learner.rollouts import make_groups, taught, uniform
from tests.learner.trainers import adapter_of, distance, gradient, make_trainer, masters

GROUPS = make_groups([[0, 1, 1, 0.5], [0, 0.5, 0, 2]], uniform)
LONGEST = 24  # tokens: prompt of up to 9, completion of up to 16, the last of which predicts nothing


def break_above(trainer: Trainer, tokens: int, where: str) -> list[int]:
    """As on a small card: micro-batches of more than `tokens` tokens raise. The sizes seen, as they come."""
    plain: Callable[..., Tensor] = trainer._policy.predicting
    seen: list[int] = []

    def fail(_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it")

    def predicting(batch: Any) -> Tensor:
        seen.append(batch.ids.numel())
        hidden = plain(batch)
        if batch.ids.numel() > tokens and where == "forward":
            fail(None)
        if batch.ids.numel() > tokens and where == "backward" and hidden.requires_grad:
            # In the middle: the second layer has its gradients by then, the first has not.
            layer = trainer._policy._lm.model.layers[0]

            def once(*_: Any) -> None:
                handle.remove()
                fail(None)

            handle = layer.register_full_backward_pre_hook(once)
            hidden = plain(batch)
        return hidden

    trainer._policy.predicting = predicting  # type: ignore[method-assign]
    return seen


def gradients_of(trainer: Trainer) -> dict[str, Tensor]:
    found = {}
    for name, weight in trainer._policy.masters.items():
        assert weight.grad is not None
        found[name] = weight.grad.clone()
    return found


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
async def test_out_of_memory_costs_time_and_nothing_else(
    tiny_path: str, adapter_path: str, where: str, dtype: Any, beta: float, caplog: pytest.LogCaptureFixture
) -> None:
    settings: dict[str, Any] = {"adapter": adapter_path, "dtype": dtype, "loss": LossConfig(beta=beta)}
    trainer = make_trainer(tiny_path, token_budget=160, **settings)
    seen = break_above(trainer, 40, where)
    with caplog.at_level(logging.WARNING, "learner"):
        metrics = await trainer.step(GROUPS)
    found = gradients_of(trainer)
    assert metrics["memory/oom_retries"] >= 1
    budget = int(metrics["memory/token_budget"])
    assert budget < 80
    assert seen[0] > 40
    told = sum("out of memory with micro-batches of up to" in r.message for r in caplog.records)
    assert told == metrics["memory/oom_retries"]
    # Equal to a run that had the smaller budget from the start, bit for bit: nothing of the broken pass is left.
    small = make_trainer(tiny_path, token_budget=budget, **settings)
    whole = await small.step(GROUPS)
    assert metrics["loss/trained_tokens"] == whole["loss/trained_tokens"]
    wanted = gradients_of(small)
    assert distance(found, wanted) == 0

    seen.clear()
    assert (await trainer.step(GROUPS))["memory/oom_retries"] == 0  # the smaller budget stays
    assert max(seen) <= 40


async def test_a_teachers_passes_keep_to_the_budget_and_lower_it(tiny_path: str, adapter_path: str) -> None:
    """data.teacher: what it reads is longer than what is trained on, and packed by the same budget."""
    settings: dict[str, Any] = {"adapter": adapter_path, "algorithm": "distill", "loss": LossConfig(beta=1)}
    groups = [taught(group, list(range(30))) for group in GROUPS]
    trainer = make_trainer(tiny_path, token_budget=160, **settings)
    seen = break_above(trainer, 60, "forward")
    metrics = await trainer.step(groups)
    budget = int(metrics["memory/token_budget"])
    assert metrics["memory/oom_retries"] >= 1
    assert max(seen) > 60 >= max(seen[-4:])
    small = make_trainer(tiny_path, token_budget=budget, **settings)
    sizes = break_above(small, 10_000, "forward")
    await small.step(groups)
    assert max(sizes) <= budget
    assert sizes == seen[-len(sizes) :]
    assert distance(gradients_of(trainer), gradients_of(small)) == 0
    wide = make_trainer(tiny_path, token_budget=1000, **settings)
    sizes = break_above(wide, 1000, "forward")
    await wide.rehearse(9, 30)
    assert sizes == [9 + 66 * 15] * 2 + [30 + 64 * 15]  # policy, its reference, and behind longer prompts the teacher


async def test_a_budget_above_the_largest_micro_batch_is_halved_from_that(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path, token_budget=10_000)
    seen = break_above(trainer, 40, "forward")
    metrics = await trainer.step(GROUPS)
    assert seen[0] // 2 >= metrics["memory/token_budget"]
    assert metrics["memory/oom_retries"] <= 3  # from 10,000 on it would be eight


async def test_a_completion_that_does_not_fit_alone(tiny_path: str) -> None:
    trainer = make_trainer(tiny_path, token_budget=160)
    break_above(trainer, 10, "forward")
    before = masters(trainer)
    with pytest.raises(OutOfMemory, match=r"one completion with its prompt, \d\d tokens, does not fit .*2.00 GiB.\)"):
        await trainer.step(GROUPS)
    assert distance(masters(trainer), before) == 0


async def test_rehearsal_runs_the_longest_and_leaves_nothing(tiny_path: str, adapter_path: str) -> None:
    trainer, fresh = (make_trainer(tiny_path, adapter=adapter_path, token_budget=1000) for _ in range(2))
    seen = break_above(trainer, 1000, "forward")
    before = masters(trainer)
    metrics = await trainer.rehearse(9)
    assert seen == [9 + 66 * 15]  # as full as whole completions of 16 tokens make it
    assert (metrics["memory/token_budget"], metrics["memory/oom_retries"]) == (1000, 0)
    assert metrics["memory/learner_peak"] > 0
    assert distance(masters(trainer), before) == 0
    assert (await adapter_of(trainer)).version == 0
    assert distance(await gradient(trainer, GROUPS), await gradient(fresh, GROUPS)) == 0
    # And a step is of one packed row: each prompt once, and of a completion all but its last token.
    assert seen[1:] == [sum(len(g["prompt_ids"][0]) + sum(len(c) - 1 for c in g["completion_ids"]) for g in GROUPS)]

    tight = make_trainer(tiny_path, token_budget=100)
    break_above(tight, 60, "backward")
    assert 40 < (await tight.rehearse(9))["memory/token_budget"] <= 50
    assert (await tight.step(GROUPS))["memory/oom_retries"] == 0
    hopeless = make_trainer(tiny_path, token_budget=100)
    break_above(hopeless, LONGEST - 1, "forward")
    with pytest.raises(OutOfMemory, match=f"{LONGEST} tokens, does not fit"):
        await hopeless.rehearse(9)


async def test_rehearsal_leaves_room_for_the_optimizer(tiny_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tiny_path)
    weights = sum(master.numel() for master in trainer._policy.masters.values())
    assert trainer._updates.updater.missing_state_bytes() == 8 * weights
    plain, made = torch.empty, []

    def empty(*size: Any, **options: Any) -> Tensor:
        made.append(plain(*size, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", empty)
    await trainer.rehearse(9)
    monkeypatch.undo()
    assert 8 * weights in [tensor.nbytes for tensor in made]
    await trainer.step(GROUPS)
    assert trainer._updates.updater.missing_state_bytes() == 0


def test_a_limit_on_a_cpu_warns_and_then_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [5000 * 2**20]
    monkeypatch.setattr(memory_limit, "peak_resident", lambda: now[0])
    limit = MemoryLimit(1000 * 2**20, torch.device("cpu"))
    for growth, warnings in ((890, 0), (910, 1), (920, 1)):
        now[0] = (5000 + growth) * 2**20
        limit.check()
        assert len(caplog.records) == warnings
    assert "peak of 910 MiB, its limit is 1000 MiB (91 %)" in caplog.records[0].message
    now[0] = 6001 * 2**20
    with pytest.raises(OutOfMemory, match="peak of 1001 MiB, its limit is 1000 MiB"):
        limit.check()
    MemoryLimit(None, torch.device("cpu")).check()


def test_a_mapped_base_is_no_part_of_what_a_cpu_learner_may_hold(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [5500 * 2**20]  # of which 500 are mapped, and were read before
    monkeypatch.setattr(memory_limit, "peak_resident", lambda: now[0])
    limit = MemoryLimit(1000 * 2**20, torch.device("cpu"), 500 * 2**20)
    now[0] = 6410 * 2**20
    limit.check()
    assert "peak of 910 MiB, its limit is 1000 MiB" in caplog.text
    now[0] = 6501 * 2**20
    with pytest.raises(OutOfMemory, match="peak of 1001 MiB"):
        limit.check()
    assert limit.peak() == 6001 * 2**20


async def test_the_limit_is_checked_after_each_step(tiny_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]  # what this process really holds differs from machine to machine
    monkeypatch.setattr(memory_limit, "peak_resident", lambda: now[0])
    trainer = make_trainer(tiny_path, memory_bytes=2**20)
    await trainer.step(GROUPS)
    now[0] = 2**21
    with pytest.raises(OutOfMemory, match="the learner's memory"):
        await trainer.step(GROUPS)


class Card:
    """torch.cuda's part in the limit; the real functions refuse a device without a number, as this does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, total: int, free: int) -> None:
        self.fraction = 0.0

        def numbered(device: torch.device) -> None:
            if device.index is None:
                raise ValueError(f"Expected a torch.device with a specified index, but got: {device}")

        def capped(fraction: float, device: torch.device) -> None:
            numbered(device)
            self.fraction = fraction

        def properties(device: torch.device) -> Any:
            return SimpleNamespace(total_memory=total)

        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", capped)


@pytest.mark.parametrize(("free", "fraction"), [(70, 0.6), (40, 0.4)])
def test_the_limit_on_a_card_is_what_is_planned_or_what_is_left(
    free: int, fraction: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gib = 2**30
    card = Card(monkeypatch, total=100 * gib, free=free * gib)
    with caplog.at_level(logging.WARNING, "learner"):
        MemoryLimit(60 * gib, device_of("cuda"))
    assert card.fraction == pytest.approx(fraction)
    assert [r.message.partition(" are free")[0] for r in caplog.records] == (
        [] if free > 60 else ["the learner's memory: only 40.0 GiB of the planned 60.0 GiB"]
    )
    with pytest.raises(ValueError, match="must be at most the 102400 MiB of cuda:0"):
        MemoryLimit(101 * gib, device_of("cuda"))


def test_devices_that_need_no_number_keep_their_name() -> None:
    assert [str(device_of(name)) for name in ("cpu", "meta", "cuda:3")] == ["cpu", "meta", "cuda:3"]


# What the learner asks of torch.cuda, without a card: torch's own Python runs, over stubs of what is compiled.
#
# So each call passes the checks that torch makes before it reaches the driver, as of a device without an index. Tensors
# are fake ones that say they are on the card; what they hold is not computed.

CARD = SimpleNamespace(name="stub", total_memory=24 * 2**30, major=9, minor=0)
TINY = Shape("tiny", "llama", 64, 160, 2, 4, 2, 16, 512, tied=True)


class Driver:
    """What torch.cuda's Python would call. fractions: (share, card) of each cap that was set; free, peak: bytes."""

    def __init__(self) -> None:
        self.fractions: list[tuple[float, int]] = []
        self.free, self.peak = CARD.total_memory, 3 * 2**30

    def set_fraction(self, share: float, card: int) -> None:
        self.fractions.append((share, card))

    def stats(self, card: int) -> dict[str, Any]:
        assert card == 0
        return {"allocated_bytes": {"all": {"peak": self.peak}}}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        monkeypatch.setattr(module, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    runtime = SimpleNamespace(cudaMemGetInfo=lambda card: (driver.free, CARD.total_memory))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    # And not torch.cuda.is_available: fake tensors would then want to start the driver.
    monkeypatch.setattr(torch._utils, "_get_available_device_type", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "_get_device_properties", lambda card: CARD, raising=False)
    compiled = {
        "_cuda_getDevice": lambda: 0,
        "_cuda_setMemoryFraction": driver.set_fraction,
        "_cuda_resetPeakMemoryStats": lambda card: None,
        "_cuda_memoryStats": driver.stats,
        "_cuda_emptyCache": lambda: None,
    }
    for name, stub in compiled.items():
        monkeypatch.setattr(torch._C, name, stub, raising=False)
    return driver


@pytest.fixture
def fake(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors without content, and a base model of such."""
    monkeypatch.setattr(policy, "load_base", random_base)
    for trial in ("check_head", "fuse"):  # they ask what the model computes
        monkeypatch.setattr(policy, trial, lambda *_, **__: None)
    monkeypatch.setattr(torch.utils, "swap_tensors", lambda *_: None)  # refuses fake tensors; peft casts
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *_: self)  # would guard the device, which is not there
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):  # where peft makes its adapters, too
        yield


def make(folder: Path, memory_bytes: int | None, **learner: Any) -> Trainer:
    (folder / "config.json").write_text(json.dumps(TINY.to_config()))
    return Trainer(
        ModelConfig(path=str(folder)),
        LearnerConfig.model_validate(learner),
        temperature=1.0,
        max_completion_length=16,
        total_steps=10,
        seed=0,
        device="cuda",
        memory_bytes=memory_bytes,
        attention=VARLEN,
    )


@pytest.mark.parametrize("checkpointing", ["auto", "none", "full"])
def test_a_learner_with_a_limit_is_built(fake: None, driver: Driver, tmp_path: Path, checkpointing: str) -> None:
    trainer = make(tmp_path, 6 * 2**30, checkpointing=checkpointing)
    assert driver.fractions == [(0.25, 0)]
    assert {str(master.device) for master in trainer._policy.masters.values()} == {"cuda:0"}
    trainer._memory.start_step()
    assert trainer._memory.peak() == driver.peak
    trainer._memory.check()
    driver.peak = 7 * 2**30
    with pytest.raises(RuntimeError, match="peak of 7168 MiB, its limit is 6144 MiB"):
        trainer._memory.check()


def test_a_limit_above_the_card_is_refused(driver: Driver) -> None:
    with pytest.raises(ValueError, match="at most the 24576 MiB of cuda:0, got 25600 MiB"):
        MemoryLimit(25 * 2**30, torch.device("cuda", 0))
    assert driver.fractions == []


def test_a_limit_above_what_is_free_gives_way(driver: Driver) -> None:
    driver.free = 3 * 2**30
    MemoryLimit(6 * 2**30, torch.device("cuda", 0))
    assert driver.fractions == [(0.125, 0)]


def test_which_attention_a_card_takes(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    assert kernels(device, torch.bfloat16)[0] == VARLEN
    assert VARLEN not in kernels(device, torch.float32)
    monkeypatch.setattr(CARD, "major", 7)
    assert VARLEN not in kernels(device, torch.bfloat16)
