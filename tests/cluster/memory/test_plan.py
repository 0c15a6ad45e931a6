"""The planner: what it promises fits, grows with the device, and a misfit says what would make it fit. Cards as
users name them, and what their generation can compute. Main memory of a run on cards: what grows with what.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.memory import learner as learner_memory
from cluster.memory import shape as units
from cluster.memory.learner import LEARNER_PROCESS, Learning, Micro, ReferenceKind
from cluster.memory.plan import CARDS, USABLE, Misfit, Plan, Wish, Workload, host_bytes, lacks, least, named, plan
from cluster.memory.shape import SHAPES, Parts
from learner.driver.memory import card_size

GIB = 2**30
PUBLISHED = Workload(generations=4, prompt=256, completion=786)


@pytest.mark.long
def test_every_model_gets_a_plan_that_fits_or_advice_that_works() -> None:
    for shape in SHAPES.values():
        found = plan(shape, 16 * GIB, PUBLISHED, Wish())
        if isinstance(found, Plan):
            assert found.device_peak <= USABLE * 16 * GIB
            assert found.sequences >= 1
            assert found.kv_bytes == found.generator["kv_cache"]
        else:
            assert isinstance(plan(shape, found.needs + 2**20, PUBLISHED, Wish()), Plan), shape.name
            assert isinstance(plan(shape, found.needs - 2**28, PUBLISHED, Wish()), Misfit), shape.name


@pytest.mark.parametrize(
    ("name", "limit"),
    [("Qwen2.5-0.5B", 2.2), ("Llama-3.2-1B", 4.2), ("Llama-3.2-3B", 9), ("Llama-3.1-8B", 20), ("Qwen2.5-14B", 36)],
)
def test_the_learner_is_near_the_floor(name: str, limit: float) -> None:
    """The whole group of the published table in one micro-batch; GB, context and fragmentation included."""
    micro = Micro.of(256, 786, 4, PUBLISHED.group)
    assert micro.completion == 4 * 786
    assert units.total(learner_memory.learner_bytes(SHAPES[name], Learning(), micro)) <= limit * 1e9


def test_more_memory_buys_less_recomputation_and_more_sequences() -> None:
    shape = SHAPES["Llama-3.2-3B"]
    plans = [plan(shape, size * GIB, PUBLISHED, Wish()) for size in (12, 16, 24, 40, 80)]
    fitting = [found for found in plans if isinstance(found, Plan)]
    assert len(fitting) == 5
    assert (fitting[0].base, fitting[1].base) == ("nf4", "none")
    assert fitting[-1].checkpointing == "none"
    sequences = [found.sequences for found in fitting[1:]]
    assert sequences == sorted(sequences)


def test_what_is_fixed_stays_and_advice_names_keys() -> None:
    shape = SHAPES["Llama-3.1-8B"]
    wish = Wish(base="none", checkpointing="none", token_budget=4096, kv_bytes=GIB, layouts=("slices",))
    found = plan(shape, 80 * GIB, PUBLISHED, wish)
    assert isinstance(found, Plan)
    assert (found.base, found.checkpointing, found.token_budget, found.kv_bytes) == ("none", "none", 4096, GIB)
    misfit = plan(shape, 48 * GIB, PUBLISHED, wish)
    assert isinstance(misfit, Misfit)
    assert "learner.checkpointing=full" in misfit.advice
    assert "rollout.kv_cache=auto" not in misfit.advice  # alone it is not enough
    assert "a second card" in str(misfit)


def test_an_fp8_cache_holds_the_same_sequences_in_half_the_bytes() -> None:
    shape, wish = SHAPES["Llama-3.2-3B"], Wish(base="none", checkpointing="full", token_budget=3396)
    wide, narrow = (plan(shape, 80 * GIB, PUBLISHED, replace(wish, kv_dtype=kind)) for kind in ("bfloat16", "fp8"))
    assert isinstance(wide, Plan)
    assert isinstance(narrow, Plan)
    assert wide.sequences == narrow.sequences
    assert wide.kv_bytes == 2 * narrow.kv_bytes


def test_a_reference_of_a_whole_model_is_planned_and_8_bits_are_advised() -> None:
    """Of Llama 3.2 1B: 1,235,814,400 weights, of which 973,078,528 in the layers' matrices with 376,832 rows."""
    shape, wish = SHAPES["Llama-3.2-1B"], Wish(mode="full", optimizer="adamw_8bit", base="none", layouts=("slices",))
    needs: dict[str, int] = {}
    kinds: list[tuple[ReferenceKind, int]] = [
        ("none", 0),
        ("auto", 2 * 1_235_814_400),
        ("int8", 2 * 262_735_872 + 973_078_528 + 2 * 376_832),
    ]
    for kind, wanted in kinds:
        small = least(shape, 80 * GIB, PUBLISHED, replace(wish, reference=kind))
        assert small.learner["reference"] == wanted
        needs[kind] = small.device_peak
    assert needs["auto"] - needs["none"] == 2 * 1_235_814_400
    misfit = plan(shape, needs["auto"], PUBLISHED, replace(wish, reference="auto"))  # 3 % are not usable
    assert isinstance(misfit, Misfit)
    assert "model.reference_dtype=int8" in misfit.advice


def test_advice_to_train_an_adapter_comes_with_an_optimizer_that_it_takes() -> None:
    wish = Wish(mode="full", optimizer="adamw_rounded", base="none", layouts=("slices",))
    misfit = plan(SHAPES["Llama-3.2-3B"], 24 * GIB, PUBLISHED, wish)
    assert isinstance(misfit, Misfit)
    assert "learner.mode=lora with learner.optimizer.kind=adamw" in misfit.advice
    misfit = plan(SHAPES["Llama-3.2-3B"], 24 * GIB, PUBLISHED, replace(wish, optimizer="adamw_8bit"))
    assert isinstance(misfit, Misfit)
    assert "learner.mode=lora" in misfit.advice


def test_alternating_holds_less_than_two_slices_and_separate_less_still() -> None:
    shape = SHAPES["Qwen2.5-3B"]
    peaks = []
    for layout in ("slices", "alternating", "separate"):
        wish = Wish(base="none", checkpointing="full", token_budget=3396, kv_bytes=2 * GIB, layouts=(layout,))
        found = plan(shape, 80 * GIB, PUBLISHED, wish)
        assert isinstance(found, Plan)
        peaks.append(found.device_peak)
    assert peaks == sorted(peaks, reverse=True)


def test_a_micro_batch_is_what_the_budget_allows() -> None:
    groups = 10_000 / 296  # a budget that is full
    assert Micro.of(100, 50, 4, 10_000) == Micro(10_000, round(groups * 200), round(groups * 696))
    each = 900 / 49  # a part of a group
    assert Micro.of(100, 50, 64, 1000) == Micro(1000, round(each * 50), round(100 + each * 149))
    assert Micro.of(100, 50, 4, 10) == Micro(149, 50, 149)  # never less than one completion


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
