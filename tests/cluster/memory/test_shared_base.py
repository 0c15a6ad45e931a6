"""One base for both roles on a card: what it takes, term by term, in GB; both processes included."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.memory.generator import cache_bytes
from cluster.memory.plan import USABLE, Misfit, Plan, Wish, Workload, plan
from cluster.memory.shape import GB, SHAPES, base_bytes

# LoRA of rank 16, groups of 8, micro-batches of 2048 tokens, every layer computed twice.
WORK = Workload(generations=8, prompt=256, completion=786, sequences=64, groups=8)
FIXED = {"checkpointing": "full", "token_budget": 2048, "layouts": ("slices",)}
LEARNER = ("adapters", "gradients", "optimizer", "checkpoints", "live", "fragmentation", "context")
GENERATOR = ("weights", "kv_cache", "lora_slots", "workspace", "graphs", "fragmentation", "context")
EIGHT, FOURTEEN = "Llama-3.1-8B", "Qwen2.5-14B"
# model, base, card in GiB, sequences; terms of learner and generator; their sum, what is usable
CARDS = [
    (EIGHT, "none", 24, 16, (0.25, 0.17, 0.34, 0.54, 0.35, 0.04, 0.50), (16.06, 2.22, 0.17, 0.50, 0.58, 0.70, 0.80),
     23.2, 25.0),
    (FOURTEEN, "none", 40, 16, (0.41, 0.28, 0.55, 1.01, 0.36, 0.06, 0.50), (29.54, 3.33, 0.28, 0.55, 0.86, 0.70, 0.80),
     39.2, 41.7),
    (EIGHT, "nf4", 12, 4, (0.25, 0.17, 0.34, 0.54, 0.47, 0.04, 0.50), (6.03, 0.56, 0.17, 0.74, 0.69, 0.70, 0.80),
     12.0, 12.5),
]  # fmt: skip


def planned(name: str, base: str, sequences: int, gib: int, *, shared: bool = True) -> Plan | Misfit:
    cache = cache_bytes(SHAPES[name], "bfloat16", WORK.whole, sequences, cuda=True)
    return plan(SHAPES[name], gib * 2**30, WORK, Wish(shared=shared, base=base, kv_bytes=cache, **FIXED))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "base", "gib", "sequences", "learner", "generator", "together", "usable"), CARDS)
def test_term_by_term(
    name: str, base: str, gib: int, sequences: int, learner: tuple[float, ...], generator: tuple[float, ...],
    together: float, usable: float,
) -> None:  # fmt: skip
    found = planned(name, base, sequences, gib)
    assert isinstance(found, Plan), found
    assert found.learner["weights"] == 0
    for parts, terms, gigabytes in ((found.learner, LEARNER, learner), (found.generator, GENERATOR, generator)):
        assert {term: parts[term] / GB for term in terms} == pytest.approx(
            dict(zip(terms, gigabytes, strict=True)), abs=0.006
        )
    assert found.device_peak == sum(found.learner.values()) + sum(found.generator.values())
    assert found.device_peak / GB == pytest.approx(together, abs=0.05)
    assert USABLE * gib * 2**30 / GB == pytest.approx(usable, abs=0.05)


def test_a_base_in_4_bits_counts_once_with_scales_in_float32() -> None:
    found = planned(EIGHT, "nf4", 4, 12)
    assert isinstance(found, Plan), found
    linear, others = 6_979_321_856, 1_050_939_392
    # 3.93 GB of the layers' matrices, a table of 16 floats for each of them, and 2.10 GB of embedding, head and norms.
    assert found.generator["weights"] == linear * 5625 // 10_000 + 64 * 7 * 32 + 2 * others
    assert base_bytes(SHAPES[EIGHT], "nf4", 2) < found.generator["weights"]  # the learner's own would be nested


@pytest.mark.parametrize(
    ("name", "base", "gib", "most", "together", "few", "twice"),
    [
        (EIGHT, "none", 24, 24, 24.3, 16, 39.3),
        (FOURTEEN, "none", 40, 24, 40.9, 16, 68.8),
        (EIGHT, "nf4", 12, 7, 12.4, 4, 17.7),
    ],
)
def test_a_second_copy_does_not_fit(
    name: str, base: str, gib: int, most: int, together: float, few: int, twice: float
) -> None:
    found = planned(name, base, most, gib)
    assert isinstance(found, Plan), found
    assert found.device_peak / GB == pytest.approx(together, abs=0.05)
    misfit = planned(name, base, few, gib, shared=False)
    assert isinstance(misfit, Misfit)
    assert misfit.least.device_peak / GB == pytest.approx(twice, abs=0.05)
    assert misfit.advice[0] == "memory.layout=shared"


def test_4_bits_are_taken_where_16_do_not_fit_and_generators_do_not_sleep() -> None:
    wish = Wish(shared=True, layouts=("slices", "alternating"))
    for gib, base in ((24, "none"), (16, "nf4"), (12, "nf4")):
        found = plan(SHAPES[EIGHT], gib * 2**30, WORK, wish)
        assert isinstance(found, Plan)
        assert (found.base, found.layout) == (base, "slices")
    assert isinstance(plan(SHAPES[EIGHT], 9 * 2**30, WORK, wish), Misfit)
    # Roles that take turns would fit.
    assert isinstance(plan(SHAPES[EIGHT], 19_000 * 2**20, WORK, replace(wish, base="none")), Misfit)


def test_a_model_in_float32_has_no_base_in_4_bits() -> None:
    found = plan(SHAPES[EIGHT], 24 * 2**30, WORK, Wish(dtype="float32", layouts=("slices",)))
    assert isinstance(found, Misfit)
    assert found.least.base == "none"
    assert not any("nf4" in change for change in found.advice)
