"""What a generator holds, and what every process on a card pays before its first tensor, by hand."""

from __future__ import annotations

from cluster.memory.generator import ENGINE_PROCESS, Serving, asleep, cache_bytes, cached_sequences, generator_bytes
from cluster.memory.learner import Learning, Micro, learner_bytes
from cluster.memory.plan import Plan, Wish, Workload, plan
from cluster.memory.shape import SHAPES, Shape

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


def test_what_vllm_computes_in_one_layer_has_slots_as_one() -> None:
    slots = {targets: generator_bytes(LLAMA, Serving(targets=targets))["lora_slots"] for targets in (
        ("q_proj",), ("k_proj", "v_proj"), ("q_proj", "k_proj", "v_proj"), ("up_proj",), ("o_proj",),
    )}  # fmt: skip
    assert list(slots.values()) == [2 * 2 * 16 * 16 * ends for ends in (*[4096 + 2 * 2560] * 3, 2 * 10240, 4096)]
