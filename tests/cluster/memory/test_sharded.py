"""The memory model of a base in shards: by hand, and that a plan counts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.memory.learner import divided_params, sharded_base_bytes, sharded_training_bytes
from cluster.memory.plan import Misfit, Plan, Wish, Workload, least, plan
from cluster.memory.shape import SHAPES

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


def test_a_whole_model_by_hand() -> None:
    """Qwen2.5-14B: 14,770,033,664 parameters, embeddings of 152,064 x 5120 apart, 48 layers, over 8 cards of 80 GiB."""
    shape = SHAPES["Qwen2.5-14B"]
    rows, embedding = 14_770_033_664 // 8, 152_064 * 5120
    layer = (14_770_033_664 - 2 * embedding) // 48
    work, wish = Workload(generations=8, prompt=256, completion=786), Wish(base="none", layouts=("separate",))
    found = plan(shape, 80 * GIB, work, replace(wish, mode="full", base_ranks=8))
    assert isinstance(found, Plan)
    wanted = {
        "weights": 0, "adapters": 4 * rows, "gradients": 4 * rows, "optimizer": 8 * rows, "update": 0,
        "gathered": max(3 * 2 * layer + 2 * 6 * layer + 4 * embedding, 8 * embedding),
    }  # fmt: skip
    assert wanted.items() <= found.learner.items()
    wide = plan(shape, 80 * GIB, work, replace(wish, mode="full", dtype="float32", base_ranks=8))
    assert isinstance(wide, Plan)
    assert (wide.learner["weights"], wide.learner["adapters"]) == (0, 4 * rows)  # masters and model are one


def test_a_tied_embedding_is_trained_whole() -> None:
    """Llama-3.2-1B, as above: its copy in bfloat16 is all that is not gathered."""
    embedding = 128_256 * 2048
    assert divided_params(SHAPES["Llama-3.2-1B"], 4) == embedding + (1_235_814_400 - embedding) // 4
    assert sharded_training_bytes(SHAPES["Llama-3.2-1B"], 2)["weights"] == 2 * embedding
    assert sharded_training_bytes(SHAPES["Llama-3.2-1B"], 4)["weights"] == 0  # masters and model are one


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(
    ("name", "embedding", "weights"),
    [("Llama-3.2-1B", 128_256 * 2048, 1_235_814_400), ("Qwen2.5-14B", 0, 14_770_033_664)],
)
def test_a_reference_is_counted_and_divided(name: str, embedding: int, weights: int, ranks: int) -> None:
    """2 bytes for each weight of a rank's share, and of a tied embedding, beside what it takes without one."""
    wish = Wish(mode="full", base="none", layouts=("separate",), base_ranks=ranks)
    plain, held = (
        least(SHAPES[name], 80 * GIB, Workload(), replace(wish, reference=kind)).learner for kind in ("none", "auto")
    )
    assert plain["reference"] == 0
    assert held == plain | {"reference": 2 * (embedding + (weights - embedding) // ranks)}


def test_a_reference_is_advised_in_shards_and_in_8_bits_only_whole() -> None:
    wish = Wish(mode="full", base="none", layouts=("separate",), reference="auto")
    for ranks, size in ((1, 166), (2, 76)):  # each a little less than there must be
        misfit = plan(SHAPES["Llama-3.1-8B"], size * GIB, Workload(), replace(wish, base_ranks=ranks))
        assert isinstance(misfit, Misfit)
        assert misfit.advice[0] == f"memory.layout=sharded with cluster.learners={2 * ranks}, a card each"
        assert ("model.reference_dtype=int8" in misfit.advice) == (ranks == 1)


def test_full_fine_tuning_of_an_8b_is_advised_in_shards() -> None:
    work, wish = Workload(generations=8, prompt=256, completion=786), Wish(base="none", layouts=("separate",))
    misfit = plan(SHAPES["Llama-3.1-8B"], 80 * GIB, work, replace(wish, mode="full"))
    assert isinstance(misfit, Misfit)
    assert misfit.advice[0] == "memory.layout=sharded with cluster.learners=2, a card each"
    assert isinstance(plan(SHAPES["Llama-3.1-8B"], 40 * GIB, work, replace(wish, mode="full", base_ranks=8)), Plan)


def test_a_14b_in_16_bits_is_trained_on_cards_of_24_gib_and_the_advice_says_how() -> None:
    """The generator over two cards, and the learner's base over its two ranks."""
    shape, work = SHAPES["Qwen2.5-14B"], Workload(generations=8, prompt=256, completion=786, shards=2)
    wish = Wish(base="none", layouts=("separate",))
    misfit = plan(shape, 24 * GIB, work, wish)
    assert isinstance(misfit, Misfit)
    assert misfit.advice[0] == "memory.layout=sharded with cluster.learners=2, a card each"
    divided, whole = (
        plan(shape, 24 * GIB, work, replace(wish, base_ranks=2, exact=True)),
        plan(shape, 80 * GIB, work, wish),
    )
    assert isinstance(divided, Plan)
    assert isinstance(whole, Plan)
    assert divided.learner["weights"] == pytest.approx(whole.learner["weights"] / 2, rel=1e-6)
