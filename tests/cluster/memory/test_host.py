"""Main memory of a run on cards: what grows with what."""

from __future__ import annotations

from dataclasses import replace

from cluster.memory.learner import LEARNER_PROCESS
from cluster.memory.plan import Wish, Workload, host_bytes, least
from cluster.memory.shape import SHAPES, Parts

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
