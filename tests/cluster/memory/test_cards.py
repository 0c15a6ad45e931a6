"""Cards as users name them, and what their generation can compute."""

from __future__ import annotations

import pytest

from cluster.memory.plan import CARDS, lacks, named
from learner.driver.memory import card_size

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
