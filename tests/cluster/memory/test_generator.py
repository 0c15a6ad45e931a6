"""What a generator holds, and what every process on a card pays before its first tensor, by hand. One base for both
roles on a card: what it takes, term by term, in GB; both processes included.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.memory.generator import (
    ENGINE_PROCESS,
    Serving,
    asleep,
    cache_bytes,
    cached_sequences,
    generator_bytes,
    kv_token_bytes,
    state_bytes,
)
from cluster.memory.learner import Learning, Micro, learner_bytes
from cluster.memory.plan import USABLE, Misfit, Plan, Wish, Workload
from cluster.memory.search import plan
from cluster.memory.shape import GB, SHAPES, SPARSE, Shape, base_bytes

LLAMA = SHAPES["Llama-3.2-1B"]  # 16 layers, h 2048, f 8192, keys 512, V 128256
CONTEXT, ENGINE_CONTEXT = 500 * 10**6, 800 * 10**6  # of the learner, of vLLM


def test_a_generator_by_hand() -> None:
    parts = {
        "weights": 2 * 1_235_814_400,
        "kv_cache": 10**9,
        # two versions, 2 bytes, rank 16: q and o 4096, k and v 2560, three of 10240, in each layer
        "lora_slots": 2 * 2 * 16 * 16 * (2 * 4096 + 2 * 2560 + 3 * 10240),
        # activations of 4096 tokens, and 16 bytes a logit of 128 sequences
        "workspace": 4096 * 2 * (2 * 8192 + 4 * 2048) + 16 * 128 * 128_256,
        "graphs": 16 * 18 * 10**6,
        "fragmentation": 700 * 10**6,
        "context": ENGINE_CONTEXT,
    }
    assert generator_bytes(LLAMA, Serving(kv_bytes=10**9)) == parts
    # Half a byte and a float32 scale of 64 for each weight of the layers, two tables; the embedding in 16 bits.
    nf4 = generator_bytes(LLAMA, Serving(base="nf4"))["weights"]
    assert nf4 == 973_078_528 * 9 // 16 + 64 * 7 * 16 + 2 * (1_235_814_400 - 973_078_528)
    assert asleep(parts) == {name: parts[name] for name in ("workspace", "graphs", "context")}
    assert "graphs" not in generator_bytes(LLAMA, Serving(cuda=False))


def test_one_of_two_shards_by_hand() -> None:
    parts = generator_bytes(LLAMA, Serving(kv_bytes=10**9, shards=2))
    assert parts == {
        "weights": 1_235_814_400,
        "kv_cache": 10**9 // 2,
        # q 2048 + 1024, k and v 2048 + 256, o 1024 + 2048, gate and up 2048 + 4096, down 4096 + 2048
        "lora_slots": 2 * 2 * 16 * 16 * (3072 + 2 * 2304 + 3072 + 3 * 6144),
        "workspace": 4096 * 2 * (8192 + 4 * 2048) + 16 * 128 * 128_256,
        "graphs": 16 * 18 * 10**6,
        "fragmentation": 700 * 10**6,
        "context": ENGINE_CONTEXT,
    }
    on_cpu = generator_bytes(LLAMA, Serving(kv_bytes=10**9, shards=2, cuda=False, pushed=10))  # both in one memory
    assert on_cpu["push"] == (2 + 1 + 1) * 10  # of one process, what both read from, and of the other
    assert [on_cpu[name] for name in ("weights", "kv_cache")] == [2 * 1_235_814_400, 10**9]
    assert on_cpu["lora_slots"] == 2 * 4 * parts["lora_slots"]  # float32 slots, and packed
    assert on_cpu["context"] == 3 * ENGINE_PROCESS


def test_two_processes_on_one_card_pay_for_two_contexts() -> None:
    wish = Wish(base="none", checkpointing="full", token_budget=2048, kv_bytes=10**9, layouts=("slices",))
    found = plan(LLAMA, 16 * 2**30, Workload(), wish)
    assert isinstance(found, Plan)
    tensors = [
        sum(size for name, size in role.items() if name != "context") for role in (found.learner, found.generator)
    ]
    assert found.device_peak == sum(tensors) + CONTEXT + ENGINE_CONTEXT
    assert learner_bytes(LLAMA, Learning(), Micro(2048, 1000, 2048))["context"] == CONTEXT


def test_layers_with_a_window_have_blocks_of_their_own() -> None:
    """As vLLM 0.32 cuts it: a Gemma 3 of 26 layers has 22 with a window, in six groups of as many as the 4 that have
    none, where two places stay empty; a window of all tokens may still begin amid a block."""
    one, two = SHAPES["Gemma-3-1B"], SHAPES["Gemma-2-2B"]
    assert (one.windowed, two.windowed, LLAMA.windowed) == ((22, 512), (13, 4096), (0, 0))
    block = 16 * 4 * 2 * 256 * 2
    assert cache_bytes(one, "bfloat16", 1024, 3, cuda=True) == (3 * (64 + 6 * 65) + 1) * block
    assert cached_sequences(one, "bfloat16", 1024, 3 * 454 * block, cuda=True) == 2
    # Of 20,000 tokens a window of 4096 keeps that many and two engine steps: 768 blocks, and one.
    assert cache_bytes(two, "bfloat16", 20_000, 1, cuda=True) == (1250 + 769 + 1) * 16 * 13 * 2 * 1024 * 2
    assert cache_bytes(two, "bfloat16", 20_000, 1, cuda=False) == (625 + 626 + 1) * 32 * 13 * 2 * 1024 * 2
    mistral = {"model_type": "mistral", "sliding_window": 4096, "hidden_size": 64, "intermediate_size": 64,
               "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 8}  # fmt: skip
    assert Shape.from_config(mistral).windowed == (4, 4096)
    assert Shape.from_config(mistral | {"sliding_window": None}).windowed == (0, 0)
    qwen = mistral | {"model_type": "qwen2", "max_window_layers": 3}
    assert Shape.from_config(qwen | {"use_sliding_window": False}).windowed == (0, 0)
    assert Shape.from_config(qwen | {"use_sliding_window": True}).windowed == (1, 4096)


def test_states_are_blocks_of_their_own() -> None:
    """Qwen3.5-35B-A3B: 10 layers of attention with 2 key heads of 256, 30 with a state of 32 matrices of 128 x 128 in
    float32 and 3 inputs of a convolution of 8192. vLLM makes pages of attention as large as that state, 16 tokens at a
    time, and groups of 10 layers."""
    shape = SPARSE["Qwen3.5-35B-A3B"]
    token, state = 2 * 2 * 256 * 2, 32 * 128 * 128 * 4 + 3 * 8192 * 2
    assert (kv_token_bytes(shape, "bfloat16"), state_bytes(shape, "bfloat16")) == (10 * token, 30 * state)
    page = 66 * 16  # tokens: 2,146,304 bytes of state in pages of 32 KiB
    assert 65 * 16 * token < state < page * token
    # 4000 tokens are 4 pages; each of three groups of states keeps two of a sequence, on a CPU one.
    assert cache_bytes(shape, "bfloat16", 4000, 3, cuda=True) == (3 * (4 + 3 * 2) + 1) * 10 * page * token
    assert cached_sequences(shape, "bfloat16", 4000, 31 * 10 * page * token, cuda=True) == 3
    assert cache_bytes(shape, "bfloat16", 4000, 1, cuda=False) == (4 + 3 + 1) * 10 * 33 * 32 * token


def test_layers_that_share_keys_and_values_cache_none() -> None:
    """Gemma 4 with 12 layers of which 4 share: 8 cache, 4 with 2 heads of 16 and a window of 32, 4 with one of 64. A
    page of the first has twice the tokens."""
    shape = Shape.from_config({
        "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 12,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64, "vocab_size": 260,
        "sliding_window": 32, "num_kv_shared_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 6,
        "hidden_size_per_layer_input": 0,
    })  # fmt: skip
    token = 2 * 64 * 2
    assert kv_token_bytes(shape, "bfloat16") == 4 * (token + token // 2)
    # 32 and twice 4096 tokens of the window are 257 pages of 32, and one that is begun.
    assert cache_bytes(shape, "bfloat16", 10_000, 1, cuda=True) == 4 * 16 * token * (10_000 // 16 + 258 + 1)


def test_experts_take_buffers_for_each_that_a_token_goes_to() -> None:
    """Qwen3-30B-A3B: 8 experts of width 768, h 2048."""
    found = generator_bytes(SPARSE["Qwen3-30B-A3B"], Serving(sequences=1))
    assert found["workspace"] == 4096 * 2 * (8 * (768 + 2048) + 4 * 2048) + 16 * 151_936
    assert found["weights"] == 2 * 30_532_122_624


def test_slots_of_experts_by_hand() -> None:
    """48 layers of 128 experts: of each two A of gate and up projection from 2048, their B to 768, and the pair of the
    down projection; and the whole attention. gpt-oss's pairs of gate and up projection are held once."""
    serving = Serving(rank=16, targets=("q_proj", "experts"), adapters=1)
    attention = 48 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    experts = 48 * 128 * (2 * 2048 + 2 * 768 + 768 + 2048)
    assert generator_bytes(SPARSE["Qwen3-30B-A3B"], serving)["lora_slots"] == 2 * 16 * (attention + experts)
    gpt_oss = SPARSE["gpt-oss-20b"]
    once = gpt_oss.lora_params(16, ("q_proj", "k_proj", "v_proj", "o_proj", "experts"))
    assert generator_bytes(gpt_oss, serving)["lora_slots"] == 2 * once


def test_what_vllm_computes_in_one_layer_has_slots_as_one() -> None:
    slots = {targets: generator_bytes(LLAMA, Serving(targets=targets))["lora_slots"] for targets in (
        ("q_proj",), ("k_proj", "v_proj"), ("q_proj", "k_proj", "v_proj"), ("up_proj",), ("o_proj",),
    )}  # fmt: skip
    assert list(slots.values()) == [2 * 2 * 16 * 16 * ends for ends in (*[4096 + 2 * 2560] * 3, 2 * 10240, 4096)]


# One base for both roles on a card: what it takes, term by term, in GB; both processes included.

# LoRA of rank 16, groups of 8, micro-batches of 2048 tokens, every layer computed twice.
WORK = Workload(generations=8, prompt=256, completion=786, sequences=64, groups=8)
FIXED = {"checkpointing": "full", "token_budget": 2048, "layouts": ("slices",)}
LEARNER = ("adapters", "gradients", "optimizer", "checkpoints", "live", "fragmentation", "context")
GENERATOR = ("weights", "kv_cache", "lora_slots", "workspace", "graphs", "fragmentation", "context")
EIGHT, FOURTEEN = "Llama-3.1-8B", "Qwen2.5-14B"
# model, base, card in GiB, sequences; terms of learner and generator; their sum, what is usable
CARDS = [
    (EIGHT, "none", 24, 16, (0.25, 0.17, 0.34, 0.54, 0.36, 0.04, 0.50), (16.06, 2.22, 0.17, 0.50, 0.58, 0.70, 0.80),
     23.2, 25.0),
    (FOURTEEN, "none", 40, 16, (0.41, 0.28, 0.55, 1.01, 0.385, 0.06, 0.50), (29.54, 3.33, 0.28, 0.55, 0.86, 0.70, 0.80),
     39.2, 41.7),
    (EIGHT, "nf4", 12, 4, (0.25, 0.17, 0.34, 0.54, 0.485, 0.04, 0.50), (6.03, 0.56, 0.17, 0.74, 0.69, 0.70, 0.80),
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
