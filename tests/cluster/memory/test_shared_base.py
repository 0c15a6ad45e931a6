"""One base for both roles on a card: what it takes, term by term, in GB; both processes included."""

from __future__ import annotations

import pytest

from cluster.memory.kv_cache import cache_bytes
from cluster.memory.plan import USABLE, Misfit, Plan, Wish, Workload
from cluster.memory.search import plan
from cluster.memory.shape import SHAPES
from cluster.memory.units import GB

# LoRA of rank 16 on 16 bits, groups of 8, micro-batches of 2048 tokens, every layer computed twice.
WORK = Workload(generations=8, prompt=256, completion=786, sequences=64, groups=8)
FIXED = {"base": "none", "checkpointing": "full", "token_budget": 2048, "layouts": ("slices",)}
LEARNER = ("adapters", "gradients", "optimizer", "checkpoints", "live", "fragmentation", "context")
GENERATOR = ("weights", "kv_cache", "lora_slots", "workspace", "graphs", "context")
CARDS = {  # model: card in GiB, terms of learner and generator with 16 sequences, their sum, what is usable
    "Llama-3.1-8B": (24, (0.25, 0.17, 0.34, 0.54, 0.35, 0.04, 0.50), (16.06, 2.22, 0.17, 0.50, 0.38, 0.50), 22.0, 25.0),
    "Qwen2.5-14B": (40, (0.41, 0.28, 0.55, 1.01, 0.36, 0.06, 0.50), (29.54, 3.33, 0.28, 0.55, 0.58, 0.50), 37.9, 41.7),
}


def planned(name: str, sequences: int, gib: int, *, shared: bool = True) -> Plan | Misfit:
    cache = cache_bytes(SHAPES[name], "bfloat16", WORK.whole, sequences, cuda=True)
    return plan(SHAPES[name], gib * 2**30, WORK, Wish(shared=shared, kv_bytes=cache, **FIXED))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CARDS)
def test_term_by_term_with_16_sequences(name: str) -> None:
    gib, learner, generator, together, usable = CARDS[name]
    found = planned(name, 16, gib)
    assert isinstance(found, Plan), found
    assert found.learner["weights"] == 0
    for parts, terms, gigabytes in ((found.learner, LEARNER, learner), (found.generator, GENERATOR, generator)):
        assert {term: parts[term] / GB for term in terms} == pytest.approx(
            dict(zip(terms, gigabytes, strict=True)), abs=0.006
        )
    assert found.device_peak / GB == pytest.approx(together, abs=0.05)
    assert USABLE * gib * 2**30 / GB == pytest.approx(usable, abs=0.05)


@pytest.mark.parametrize(
    ("name", "gib", "most", "together", "twice"),
    [("Llama-3.1-8B", 24, 32, 24.2, 38.1), ("Qwen2.5-14B", 40, 24, 39.6, 67.5)],
)
def test_a_second_copy_does_not_fit(name: str, gib: int, most: int, together: float, twice: float) -> None:
    found = planned(name, most, gib)
    assert isinstance(found, Plan), found
    assert found.device_peak / GB == pytest.approx(together, abs=0.05)
    misfit = planned(name, 16, gib, shared=False)
    assert isinstance(misfit, Misfit)
    assert misfit.least.device_peak / GB == pytest.approx(twice, abs=0.05)
    assert misfit.advice[0] == "memory.base=shared"


def test_a_base_in_4_bits_is_not_chosen_and_generators_do_not_sleep() -> None:
    wish = Wish(shared=True, layouts=("slices", "alternating"))
    assert isinstance(plan(SHAPES["Llama-3.1-8B"], 16 * 2**30, WORK, wish), Misfit)  # QLoRA would fit
    assert isinstance(plan(SHAPES["Llama-3.1-8B"], 19_000 * 2**20, WORK, wish), Misfit)  # roles that take turns would
    found = plan(SHAPES["Llama-3.1-8B"], 24 * 2**30, WORK, wish)
    assert isinstance(found, Plan)
    assert (found.base, found.layout) == ("none", "slices")
