"""Cards as users name them, what their generation can compute, and main memory of a run on cards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.memory.learner import LEARNER_PROCESS
from cluster.memory.plan import CARDS, Wish, Workload, host_bytes, lacks, named
from cluster.memory.search import least
from cluster.memory.shape import SHAPES, Parts
from learner.driver.memory import card_size

GIB = 2**30
PUBLISHED = Workload(generations=4, prompt=256, completion=786)


# Cards as users name them, and what their generation can compute.

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("rtx4090", 24564 - 640),
        ("NVIDIA GeForce RTX 4090", 24564 - 640),
        ("4090", 24564 - 640),
        ("Tesla T4", 15360 * 0.97),
        ("A100-80GB", 81920 - 640),
        ("h100", 81559 - 640),
        ("H100 NVL", 95830 - 640),
        ("24", 23028 - 640),  # an A10's: the least of what is sold as 24 GB
        (" 80 ", 81559 - 640),
        ("24GiB", 24 * 1024),
        ("1024MiB", 1024),
    ],
)
def test_a_card_by_name_by_what_it_is_sold_as_or_by_size(text: str, mib: int) -> None:
    assert card_size(text).bytes == pytest.approx(mib * MIB, abs=1)


def test_a_number_says_what_was_understood_and_a_name_which_card() -> None:
    found = card_size("24")
    assert found.card is None
    assert found.note == (
        "24 GB as sold: 21.9 GiB, the least that is free on such a card (rtx3090, rtx4090, rtxa5000, a10, a10g, l4); a "
        "name is exact"
    )
    assert card_size("l4").card in CARDS
    assert card_size("24GB").bytes == 24 * 10**9


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a100", "a100 is of several sizes; give one of a100-40gb, a100-80gb"),
        ("rtx490", "got 'rtx490'; did you mean rtx4090"),
        ("lots", "must be a card or its size, for example 24GiB, 24 (GB as cards are sold) or rtx4090, got 'lots'"),
        ("23", "got '23'"),
        ("-24GiB", "got '-24GiB'"),
        ("", "got ''"),
    ],
)
def test_what_is_neither_is_refused_with_what_may_have_been_meant(text: str, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        card_size(text)
    assert told in str(caught.value)


def test_every_name_finds_its_card_and_no_other() -> None:
    assert [named(card.name) for card in CARDS] == [(card,) for card in CARDS]
    assert all(0.9 * card.sold * 10**9 < card.bytes <= card.sold * 2**30 * 1.03 for card in CARDS)


def test_what_a_generation_cannot_compute() -> None:
    """T4 has neither bfloat16 nor fp8, A100 no fp8, and for V100 there is no code."""
    able = {
        (capability, dtype, kv): lacks(capability, dtype=dtype, kv_dtype=kv) is None
        for capability in ((7, 0), (7, 5), (8, 0), (8, 9), (10, 0))
        for dtype, kv in (("float16", "auto"), ("bfloat16", "auto"), ("float16", "fp8"))
    }
    assert [key for key, can in able.items() if can] == [
        ((7, 5), "float16", "auto"),
        ((8, 0), "float16", "auto"), ((8, 0), "bfloat16", "auto"),
        ((8, 9), "float16", "auto"), ((8, 9), "bfloat16", "auto"), ((8, 9), "float16", "fp8"),
        ((10, 0), "float16", "auto"), ((10, 0), "bfloat16", "auto"), ((10, 0), "float16", "fp8"),
    ]  # fmt: skip


# Main memory of a run on cards: what grows with what.

LLAMA, N = SHAPES["Llama-3.2-1B"], 1_235_814_400


def host(
    wish: Wish, *, rewards: int = 1, generators: int = 1, models: int = 0, environments: int = 0, shards: int = 1
) -> Parts:
    found, store = least(LLAMA, 80 * 2**30, Workload(generators=generators, shards=shards), wish), 2**28
    return host_bytes(
        found, wish, object_store=store, reward_processes=rewards, reward_models=models, environments=environments
    )


def test_by_hand() -> None:
    slices = Wish(base="none", checkpointing="full", token_budget=2048, layouts=("slices",))
    plain = host(slices)
    assert plain["passing"] == 2 * N  # the learner's weights as they are loaded
    assert (plain["asleep"], plain["offloaded"], plain["paged"]) == (0, 0, 0)
    asleep = host(replace(slices, layouts=("alternating",)))
    assert asleep["asleep"] == 2 * N + 2 * 2 * LLAMA.lora_params(16)  # two adapter versions
    assert host(replace(slices, base="nf4"))["passing"] == 2 * 128_256 * 2048
    ranks, value = replace(slices, undo=True), 2048 + LLAMA.lora_params(8)  # a head, and an adapter of rank 8
    assert host(ranks)["undo"] == 12 * LLAMA.lora_params(16)
    assert host(replace(ranks, value_rank=8))["undo"] == 12 * (LLAMA.lora_params(16) + value)
    assert host(replace(slices, offload=True))["offloaded"] == 16 * 2 * 2048 * 2048
    whole = replace(slices, mode="full", optimizer="paged_adamw_8bit")
    assert host(whole)["paged"] == 2 * N
    assert (host(whole)["policy"], plain["policy"]) == (2 * 2 * N, 0)  # this policy and the one before
    stored = replace(whole, undo=True)  # through the object store
    assert (host(stored)["policy"], host(stored)["passing"]) == (0, 3 * 2 * N)
    for wish, policy in ((whole, 2), (stored, 2)):  # of the second one for the processes of each generator
        spread = host(replace(wish, layouts=("separate",)), generators=2, shards=2)
        assert spread["policy"] == policy * 2 * N
        assert spread["passing"] == host(wish)["passing"]
    many = host(slices, rewards=6, generators=2, environments=64)
    assert many["environments"] == 2 * (290 + 64 * 11) * 10**6
    assert plain["environments"] == 0
    assert many["rewards"] == 6 * plain["rewards"]
    two = host(slices, rewards=2, models=10**9)  # a reward model in each of two processes, with torch
    assert two["rewards"] == 2 * (10**9 + LEARNER_PROCESS)
    assert many["generators"] == 2 * plain["generators"]
