"""Seconds of a step: by hand for a small shape, what makes them longer, and the cards whose rates they are told for."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from cluster.memory import seconds
from cluster.memory.plan import Plan, Wish, Workload, kind_of
from cluster.memory.search import plan
from cluster.memory.seconds import Host, Pace, Rates, step_seconds
from cluster.memory.shape import SHAPES, SPARSE, Shape
from learner.batch.micro_batch import micro_batches, read
from rollout.fakes import make_group
from rollout.types import Completion

SMALL = Shape("small", "llama", 8, 16, 2, 2, 1, 4, 32, tied=True)
WORK = Workload(generations=4, prompt=6, completion=10, sequences=4)
LORA = Wish(base="none", checkpointing="none", token_budget=16, kv_bytes=2**34, layouts=("slices",))
PACE = Pace(groups=2, length=10.0)
RATES = Rates(flops=1000.0, bandwidth=100.0)
HOST = Host(
    step=1.0, sequence=0.25, layer=0.5, decoding=0.5, reading=0.8, products=0.5, attention=0.25, layer_pass=(2.0, 1.0),
    update=0.75, push=3.0,
)  # fmt: skip


def told(
    shape: Shape = SMALL, work: Workload = WORK, wish: Wish = LORA, pace: Pace = PACE, rates: Rates = RATES, **own: Any
) -> seconds.Seconds:
    """own: of the plan, in place of its choice."""
    found = plan(shape, 2**60, work, wish)
    assert isinstance(found, Plan)
    return step_seconds(replace(found, **own), wish, work, pace, rates)


def test_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seconds, "ON_CARD", HOST)
    n = SMALL.params
    # q 64, k and v 32 each, o 64, three of 128: 576 a layer, 16 more of norms; 256 of the tied embedding, 8 of the norm
    assert n == 2 * (576 + 16) + 256 + 8
    # Two groups of 4, 4 at once: 20 decoding steps. Each reads 2n bytes and the cache of 4 sequences at 6 + 5 tokens,
    # 2 layers x 2 x 1 head x 4 x 2 bytes = 32 a token, at 80 a second; or multiplies 2 x 4 x n at 500.
    reads, multiplies = (2 * n + 4 * 11 * 32) / 80, 8 * n / 500
    prefill = 2 * n * 2 * 6 / 500
    generate = 20 * (1 + 4 * 0.25 + 2 * 0.5 + max(reads, multiplies)) + prefill
    # Micro-batches of 16 tokens hold a prompt and one completion: 2 x 4 x (6 + 9) = 120 tokens, twice through n weights
    # and 2 x 2 x 2 x 4 = 32 products with each of 6 + 5 keys, at a quarter of the rate.
    products = 120 * 2 * (2 * n + 4 * 2 * 32 * 11) / 500
    moved = 120 * (416 * 2 * 8 + 48 * 32) / 80
    train = products + moved + 8 * 2 * 2 * 2.0 + 0.75  # micro-batches, passes, layers
    found = told()
    assert found.generate == pytest.approx(generate)
    assert found.train == pytest.approx(train)
    assert found.push == 3.0
    assert found.step == pytest.approx(generate + train + 3)
    # At once, one card has the work of both to do, and each of two cards its own.
    at_once = replace(PACE, together=True)
    busy = 20 * max(reads, multiplies) + prefill + products + moved
    assert told(pace=at_once).step == pytest.approx(max(generate, train, busy) + 3)
    assert told(pace=at_once, layout="separate").step == pytest.approx(max(generate, train) + 3)


@pytest.mark.parametrize("budget", [1279, 1600, 2048, 3064, 4096, 6536, 8192])
@pytest.mark.parametrize(("prompt", "completion"), [(1024, 256), (256, 786), (40, 80)])
def test_micro_batches_are_those_that_the_learner_makes(prompt: int, completion: int, budget: int) -> None:
    ids = np.zeros(completion, np.int32)
    sampled = [Completion(ids, np.zeros(completion, np.float32), "stop", ids)] * 8
    groups = [make_group(prompt_ids=[[i] * prompt] * 8, completions=sampled, rewards=[0.0, 1.0] * 4) for i in range(8)]
    rows = read(groups)
    made = micro_batches(rows, np.zeros(64 * completion), np.ones(64), np.ones(64, bool), budget, packed=True)
    work = Workload(generations=8, prompt=prompt, completion=completion)
    tokens, count = seconds.micro_batches(budget, work, Pace(8, float(completion)))
    assert tokens == sum(batch.ids.numel() for batch in made)
    assert count == pytest.approx(len(made), rel=0.15)


@pytest.mark.parametrize(
    ("changes", "longer"),
    [
        ({"pace": replace(PACE, length=5.0)}, (False, False)),
        ({"sequences": 2}, (True, None)),
        ({"work": replace(WORK, generations=8)}, (True, True)),
        ({"pace": replace(PACE, workers=2)}, (False, None)),
        ({"pace": replace(PACE, learners=2)}, (None, False)),
        ({"pace": replace(PACE, groups=4)}, (True, True)),
        ({"pace": replace(PACE, further=1.0)}, (None, True)),
        ({"pace": replace(PACE, updates=2)}, (None, True)),
        ({"checkpointing": "full"}, (None, True)),
        ({"checkpointing": 1}, (None, True)),
        ({"token_budget": 42}, (None, False)),
        ({"base": "nf4"}, (True, None)),
        ({"generators": 2}, (True, None)),
        ({"shards": 2}, (False, None)),
        ({"wish": replace(LORA, kv_dtype="fp8")}, (False, None)),
    ],
)
def test_what_makes_a_step_longer(changes: dict[str, Any], longer: tuple[bool | None, bool | None]) -> None:
    """True: longer, False: shorter, None: as long."""
    plain, found = told(), told(**changes)
    for way, before, after in zip(longer, (plain.generate, plain.train), (found.generate, found.train), strict=True):
        assert (None if after == pytest.approx(before) else after > before) == way


def test_whole_weights_are_pushed_in_their_bytes_and_sleep_costs_the_bytes_that_move() -> None:
    shape = SHAPES["Llama-3.2-1B"]
    full, lora = (told(shape, wish=replace(LORA, mode=mode)) for mode in ("full", "lora"))
    assert full.push - lora.push == pytest.approx(shape.params * 2 / 10e9)
    asleep = told(shape, layout="alternating")
    assert asleep.push - lora.push == pytest.approx(shape.params * 2 / 3.7e9)


def test_experts_that_a_token_skips_are_read_and_not_multiplied_by() -> None:
    shape = SPARSE["Qwen3-30B-A3B"]
    assert 5 * shape.active_params < shape.params
    reads, multiplies = (told(shape, rates=rates).generate for rates in (Rates(1e30, 1.0), Rates(1.0, 1e30)))
    assert reads == pytest.approx(20 * 2 * shape.params / seconds.ON_CARD.reading, rel=0.01)
    assert multiplies < 20 * 2 * shape.params * 4 / 3


@pytest.mark.parametrize(
    ("kind", "size", "line"),
    [
        (kind_of("NVIDIA L4", 23034 * 2**20), 24e9, r"time: about [0-9.]+ s a step \(generation .* for 9 steps on l4$"),
        (None, 24 * 2**30, r"time: about [0-9.]+ s a step on rtx4090 to [0-9.]+ s on l4, .* to .* for 9 steps$"),
    ],
)
def test_a_size_alone_is_told_its_fastest_and_its_slowest_card(kind: Any, size: float, line: str) -> None:
    shape = SHAPES["Qwen2.5-1.5B"]
    found = plan(shape, 2**60, WORK, LORA)
    assert isinstance(found, Plan)
    said = seconds.told(kind, int(size), partial(step_seconds, found, LORA, WORK, PACE), 9)
    assert said is not None
    assert re.match(line, said)
    assert seconds.told(None, 60 * 2**30, partial(step_seconds, found, LORA, WORK, PACE), 9) is None


def test_words() -> None:
    found = seconds.Seconds(3.25, 1.0, 0.25, together=False)
    assert found.words(200) == ("4.5 s a step (generation 3.2 s, training 1.0 s, push 0.2 s), 15 min for 200 steps")
    assert "the first two at once" in replace(found, together=True).words(1)


def test_the_rates_of_this_machine_are_those_of_a_computer() -> None:
    rates = seconds.measured_rates("float32", 1)
    assert 1e8 < rates.flops < 1e13
    assert 1e8 < rates.bandwidth < 1e12


@pytest.mark.parametrize(
    ("name", "mib", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"), ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, None),
        ("NVIDIA L4", 23034, "l4"), ("NVIDIA L40S", 46068, "l40s"), ("Tesla T4", 15360, "t4"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"), ("NVIDIA H100 PCIe", 81559, "h100-pcie"),
        ("NVIDIA A100-PCIE-40GB", 40960, "a100-40gb"), ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx4060ti"),
        ("NVIDIA GeForce RTX 3090 Ti", 24564, None), ("NVIDIA GeForce RTX 4060 Laptop GPU", 8188, None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887, None),
        ("NVIDIA H200 MIG 1g.18gb", 18432, None),
        ("NVIDIA H100 NVL", 95830, "h100-nvl"),
        ("NVIDIA A10G", 23028, "a10g"), ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx6000ada"),
        ("Quadro P4000", 8192, None),
    ],
)  # fmt: skip
def test_a_card_s_kind_by_the_driver_s_name(name: str, mib: int, kind: str | None) -> None:
    found = kind_of(name, mib * 2**20)
    assert (found and found.name) == kind
    assert found is None or (found.flops > 1e13 and found.bandwidth > 1e11)
