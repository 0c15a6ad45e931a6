"""The memory model of a base in shards: by hand, and that a plan counts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.memory.plan import Misfit, Plan, Wish, Workload
from cluster.memory.search import plan
from cluster.memory.shape import SHAPES
from cluster.memory.sharded import sharded_base_bytes

GIB = 2**30


def test_the_bytes_of_a_rank_by_hand() -> None:
    """Llama-3.1-8B: 8,030,261,248 parameters, embeddings of 128,256 x 4096 that are not tied, 32 layers."""
    embedding = 2 * 128_256 * 4096
    found = sharded_base_bytes(SHAPES["Llama-3.1-8B"], 2, 4)
    assert found["weights"] == 2 * 8_030_261_248 // 4
    assert found["gathered"] == 2 * embedding > 3 * (2 * 8_030_261_248 - 2 * embedding) // 32


def test_a_tied_embedding_stays_whole() -> None:
    """Llama-3.2-1B: 1,235,814,400 parameters, of which 128,256 x 2048 are both embeddings, 16 layers."""
    embedding = 2 * 128_256 * 2048
    rest = 2 * 1_235_814_400 - embedding
    found = sharded_base_bytes(SHAPES["Llama-3.2-1B"], 2, 2)
    assert found == {"weights": embedding + rest // 2, "gathered": 3 * (rest // 16)}


def test_a_14b_in_16_bits_is_trained_on_cards_of_24_gib_and_the_advice_says_how() -> None:
    """The generator over two cards, and the learner's base over its two ranks."""
    shape, work = SHAPES["Qwen2.5-14B"], Workload(generations=8, prompt=256, completion=786, shards=2)
    wish = Wish(base="none", layouts=("separate",))
    misfit = plan(shape, 24 * GIB, work, wish)
    assert isinstance(misfit, Misfit)
    assert misfit.advice[0] == "memory.base=sharded with cluster.learners=2, a card each"
    divided, whole = (
        plan(shape, 24 * GIB, work, replace(wish, base_ranks=2, exact=True)),
        plan(shape, 80 * GIB, work, wish),
    )
    assert isinstance(divided, Plan)
    assert isinstance(whole, Plan)
    assert divided.learner["weights"] == pytest.approx(whole.learner["weights"] / 2, rel=1e-6)
