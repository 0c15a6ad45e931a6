"""The memory model's coefficients against the fake run of the step that trains: within 2 % of the learner's peak.
The memory model of a base in shards: by hand, and that a plan counts it.
"""

from __future__ import annotations

import functools
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from cluster.memory.learner import (
    MLP_TILE,
    VOCAB_TILE,
    WIDENED_ROWS,
    WINDOW_TILE,
    Learning,
    Micro,
    ReferenceKind,
    divided_params,
    learner_static,
    sharded_base_bytes,
    sharded_training_bytes,
    step_bytes,
)
from cluster.memory.plan import Misfit, Plan, Wish, Workload
from cluster.memory.search import least, plan
from cluster.memory.shape import ALL, ATTENTION, SHAPES, SPARSE, Checkpointing, OptimizerKind, Shape, total
from learner.config.settings import LearnerConfig, LoraConfig
from learner.model import attention, logprob, lora, masters
from learner.model import policy as policy_module
from learner.tools.meta_run import Footprint, footprint

CASES: list[tuple[str, Checkpointing, str, int, tuple[int, int, int]]] = [
    ("Qwen2.5-0.5B", "full", "none", 16, (256, 786, 4)),
    ("Llama-3.2-1B", "none", "none", 16, (256, 786, 4)),
    ("Qwen3-4B", "mlp", "none", 16, (256, 300, 8)),
    ("Llama-3.1-8B", "full", "nf4", 16, (256, 786, 4)),
    ("Qwen2.5-14B", "full", "none", 64, (512, 500, 4)),
    ("Gemma-3-1B", "full", "none", 16, (2000, 300, 8)),
    ("SmolLM2-135M", 3, "none", 16, (256, 786, 4)),
    ("SmolLM2-135M", "full", "none", 16, (256, 786, 4)),  # the head is the peak
    ("SmolLM2-135M", "full", "none", 16, (256, 300, 2)),  # the head, with fewer tokens than a tile has room for
    ("Qwen2.5-7B", 2, "none", 16, (1000, 100, 8)),
    ("Gemma-2-2B", "mlp", "none", 16, (256, 786, 4)),
    ("Gemma-2-9B", "full", "none", 16, (5000, 2000, 3)),  # prompts longer than the window, which have masks
    ("Gemma-2-2B", "none", "none", 16, (1024, 4000, 4)),
]
SLOW = (0, 1, 2, 3, 4, 5, 6, 9, 11, 12)  # with what others have, too


@functools.cache
def measured(
    name: str, policy: Checkpointing, base: str, rank: int, lengths: tuple[int, int, int], algorithm: str
) -> Footprint:
    prompt, completion, count = lengths
    settings = {
        "algorithm": algorithm, "checkpointing": policy, "lora": {"rank": rank},
        "token_budget": prompt + count * (completion - 1),
    }  # fmt: skip
    # Twice: in the second micro-batch the gradients of the first are there.
    groups = [(prompt, [completion] * count), (prompt + 1, [completion - 1] * count)]
    return footprint(replace(SHAPES[name], layers=4), LearnerConfig.model_validate(settings), groups, base=base)


@pytest.mark.parametrize(
    ("name", "policy", "base", "rank", "lengths"),
    [pytest.param(*case, marks=[pytest.mark.long] if i in SLOW else []) for i, case in enumerate(CASES)],
)
def test_the_model_is_the_step(
    name: str, policy: Checkpointing, base: str, rank: int, lengths: tuple[int, int, int]
) -> None:
    """Four layers of the real widths: every part is linear in the number of layers."""
    shape = replace(SHAPES[name], layers=4)
    prompt, completion, count = lengths
    budget = prompt + count * (completion - 1)
    fake = measured(name, policy, base, rank, lengths, "grpo")
    learning = Learning(rank=rank, base="nf4" if base == "nf4" else "none", checkpointing=policy)
    micro = Micro.of(prompt, completion, count, budget)
    static = learner_static(shape, learning)
    parts = {"weights": fake.weights, "adapters": fake.adapters, "gradients": fake.gradients, "reference": 0}
    assert static == pytest.approx(parts | {"optimizer": fake.optimizer}, rel=0.01)
    assert total(static, step_bytes(shape, learning, micro)) == pytest.approx(fake.peak, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "base", "lengths"),
    [
        ("Llama-3.1-8B", "nf4", (1024, 4000, 8)), ("Llama-3.1-8B", "none", (1024, 4000, 4)),
        ("Qwen2.5-0.5B", "none", (1024, 4000, 8)), ("Qwen3-4B", "none", (4000, 8000, 2)),
        ("Gemma-2-2B", "none", (1024, 4000, 4)), ("Gemma-3-1B", "none", (1024, 4000, 4)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["full", "offloaded"])
def test_long_rows(
    policy: Any, name: str, base: Any, lengths: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step takes beside weights, which here is most of it, within 3 %. What is offloaded stays: meta tensors
    cannot be moved."""
    monkeypatch.setattr(policy_module, "offloaded", lambda _: nullcontext())
    shape, (prompt, completion, count) = replace(SHAPES[name], layers=4), lengths
    fake = measured(name, policy, base, 16, lengths, "grpo")
    learning = Learning(rank=16, base=base, checkpointing="full", offload=policy == "offloaded")
    micro = Micro.of(prompt, completion, count, prompt + count * (completion - 1))
    stays = 4 * 2 * shape.hidden * micro.tokens if learning.offload else 0
    assert total(step_bytes(shape, learning, micro)) + stays == pytest.approx(fake.peak - fake.static, rel=0.03)
    if learning.offload:
        whole = replace(learning, offload=False)
        assert total(step_bytes(shape, learning, micro)) < 0.85 * (total(step_bytes(shape, whole, micro)) - stays)
        assert MLP_TILE == policy_module.MLP_TILE


FOUR = {"num_hidden_layers": 4}
# With experts all-linear is attention, and layers before the first that has an adapter would keep nothing.
HYBRID = FOUR | {"num_experts": 32, "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"]}
# Layers of real widths whose kinds are not alike.
MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("qwen3_moe", dict(SPARSE["Qwen3-30B-A3B"].settings) | FOUR),
    "Mixtral": ("mixtral", FOUR),
    "gpt-oss": ("gpt_oss", FOUR),
    "Llama 4": ("llama4_text", FOUR),
    "Qwen3.5": ("qwen3_5_text", FOUR),
    "Qwen3.5-MoE": ("qwen3_5_moe_text", HYBRID),
    "Qwen3-Next": ("qwen3_next", HYBRID),
    "OLMo-Hybrid": ("olmo_hybrid", FOUR),
    "LFM2": ("lfm2", FOUR | {"full_attn_idxs": [2]}),
    "Ministral 3": ("ministral3", FOUR),
    "Gemma 4": ("gemma4_text", {"num_hidden_layers": 6}),
    "Gemma 4, sharing": (
        "gemma4_text",
        {
            "num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
        },
    ),
    "Gemma 4, keys are values": (
        "gemma4_text",
        {
            "num_hidden_layers": 6, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
        },
    ),
}  # fmt: skip


def shape_of(kind: str, settings: dict[str, Any], name: str) -> Shape:
    """Of transformers' configuration of a model type with these settings."""
    return Shape.from_config(json.loads(json.dumps(AutoConfig.for_model(kind, **settings).to_dict())), name)


@pytest.mark.long
def test_gradients_that_are_added_together_take_32_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """At rank 128 the gradients of the adapters are larger than the activations of a micro-batch."""
    shape, rank = replace(SHAPES["Llama-3.2-3B"], layers=8), LoraConfig(rank=128, alpha=256)
    learner = LearnerConfig(token_budget=700, checkpointing="full", lora=rank)
    found = []
    for most in (0, masters.MOST_TOGETHER, 2**40):
        monkeypatch.setattr(masters, "MOST_TOGETHER", most)
        found.append(footprint(shape, learner, [(256, [200] * 2)] * 2).dynamic)
    alone, some, together = found
    assert alone <= some <= alone + 2**25 < together


@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *((name, ALL) for name in MIXED),
        *((name, (*ATTENTION, "experts")) for name in ("Qwen3-MoE", "Mixtral", "gpt-oss", "Qwen3.5-MoE", "Qwen3-Next")),
    ],
)
def test_the_model_is_the_step_of_layers_that_are_not_alike(
    name: str, policy: Checkpointing, targets: tuple[str, ...]
) -> None:
    """Linear attention is the one that torch computes, packed."""
    kind, settings = MIXED[name]
    shape = shape_of(kind, {key: value for key, value in settings.items() if key != "model_type"}, name)
    told = {"push": "merged", "lora": {"targets": list(targets)}} if "experts" in targets else {}
    learner = LearnerConfig.model_validate({"checkpointing": policy, "token_budget": 2648, **told})
    fake = footprint(shape, learner, [(256, [300] * 8), (257, [299] * 8)])
    learning = Learning(checkpointing=policy, targets=targets)
    static = learner_static(shape, learning)
    parts = {"weights": fake.weights, "adapters": fake.adapters, "gradients": fake.gradients, "reference": 0}
    assert static == pytest.approx(parts | {"optimizer": fake.optimizer}, rel=0.01)
    planned = step_bytes(shape, learning, Micro.of(256, 300, 8, 2648))
    assert total(static, planned) == pytest.approx(fake.peak, rel=0.03)
    assert total(planned) == pytest.approx(fake.dynamic, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("lengths", [(1024, 300, 4), (64, 600, 6), (4096, 512, 8)])
def test_attention_with_sinks_takes_what_blocks_of_completions_do(
    lengths: tuple[int, int, int], policy: Checkpointing
) -> None:
    """Of a gpt-oss with small experts; a prompt's keys count once for all completions that are as long together."""
    prompt, completion, count = lengths
    settings = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 720}
    assert WINDOW_TILE == attention.WINDOW_TILE
    shape = shape_of("gpt_oss", FOUR | settings, "gpt-oss")
    budget = prompt + count * (completion - 1)
    learner = LearnerConfig.model_validate({"checkpointing": policy, "token_budget": budget})
    fake = footprint(shape, learner, [(prompt, [completion] * count)])
    planned = step_bytes(shape, Learning(checkpointing=policy), Micro.of(prompt, completion, count, budget))
    assert total(planned) == pytest.approx(fake.dynamic, rel=0.1)


def test_adapters_of_experts_by_hand() -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts, 2048 x 768. Of rank 16 an expert has 16 * (2048 + 2 * 768) weights for
    gate and up projection, and 16 * (768 + 2048) for the other."""
    shape = SPARSE["Qwen3-30B-A3B"]
    assert shape.lora_params(16, ("experts",)) == 48 * 128 * 16 * (2048 + 2 * 768 + 768 + 2048)
    assert shape.lora_params(16, (*ATTENTION, "experts")) == shape.lora_params(16) + shape.lora_params(16, ("experts",))


@pytest.mark.parametrize(
    ("window", "prompts"), [(0, 0), (4096, 0), (200, 256 * 256)], ids=["no window", "longer than the prompt", "shorter"]
)
def test_masks_by_hand(window: int, prompts: int) -> None:
    """4 completions of 784 tokens are a block each, and 8 of 100 under a prompt of 256 are blocks of 2."""
    assert Micro.of(256, 785, 4, 256 + 4 * 784).mask_elements(window) == prompts + 4 * 784 * (256 + 784)
    assert Micro.of(256, 101, 8, 256 + 8 * 100).mask_elements(window) == prompts + 4 * 200 * (256 + 200)


@pytest.mark.long
@pytest.mark.parametrize(("name", "policy", "base", "rank", "lengths"), [CASES[i] for i in (1, 3)])
def test_a_value_adds_its_states_and_nothing_to_what_a_step_takes(
    name: str, policy: Checkpointing, base: str, rank: int, lengths: tuple[int, int, int]
) -> None:
    """PPO's peak is GRPO's and the value's adapter, masters, gradients and moments: by the step itself, and as
    planned."""
    shape = replace(SHAPES[name], layers=4)
    prompt, completion, count = lengths
    budget = prompt + count * (completion - 1)
    grpo, ppo = (measured(name, policy, base, rank, lengths, one) for one in ("grpo", "ppo"))
    assert ppo.dynamic <= grpo.dynamic
    learning = Learning(rank=rank, base="nf4" if base == "nf4" else "none", checkpointing=policy, value_rank=rank)
    static = learner_static(shape, learning)
    parts = {"weights": ppo.weights, "adapters": ppo.adapters, "gradients": ppo.gradients, "reference": 0}
    assert static == pytest.approx(parts | {"optimizer": ppo.optimizer}, rel=0.01)
    micro = Micro.of(prompt, completion, count, budget)
    assert total(static, step_bytes(shape, learning, micro)) == pytest.approx(ppo.peak, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "policy", "dtype"),
    [
        ("Llama-3.2-1B", "full", "bfloat16"),
        ("Qwen2.5-0.5B", "none", "bfloat16"),
        ("Qwen2.5-0.5B", "none", "float32"),
        ("Qwen2.5-0.5B", 2, "float32"),
    ],
)
def test_on_a_cpu(name: str, policy: Checkpointing, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no instructions for products of 16 bits, whatever this one has."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64"})
    assert WIDENED_ROWS == lora.WIDENED_TILE
    shape = replace(SHAPES[name], layers=4)
    settings = {"checkpointing": policy, "token_budget": 2648}
    groups = [(256, [300] * 8), (257, [299] * 8)]
    fake = footprint(shape, LearnerConfig.model_validate(settings), groups, dtype=dtype, cuda=False)
    learning = Learning(checkpointing=policy, cuda=False, dtype=dtype)
    planned = total(learner_static(shape, learning), step_bytes(shape, learning, Micro.of(256, 300, 8, 2648)))
    assert planned == pytest.approx(fake.peak, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "policy", "dtype"),
    [
        ("Qwen2.5-0.5B", "none", "float16"),
        ("SmolLM2-1.7B", "none", "float16"),
        ("Llama-3.2-1B", "mlp", "float32"),
    ],
)
def test_on_a_card_without_flash_attention(name: str, policy: Checkpointing, dtype: str) -> None:
    shape = replace(SHAPES[name], layers=4)
    settings = {"checkpointing": policy, "token_budget": 3396}
    groups = [(256, [786] * 4), (257, [785] * 4)]
    fake = footprint(shape, LearnerConfig.model_validate(settings), groups, dtype=dtype)
    learning = Learning(checkpointing=policy, dtype=dtype)
    planned = total(learner_static(shape, learning), step_bytes(shape, learning, Micro.of(256, 786, 4, 3396)))
    assert planned == pytest.approx(fake.peak, rel=0.03)


@pytest.mark.parametrize(
    ("name", "layers", "policy", "reference", "optimizer"),
    [
        pytest.param("Llama-3.1-8B", 2, "full", "none", "adamw", marks=pytest.mark.long),
        ("Qwen2.5-0.5B", 8, "none", "none", "adamw"),
        pytest.param("Qwen3-0.6B", 8, "none", "auto", "adamw", marks=pytest.mark.long),
        pytest.param("Gemma-3-1B", 8, "none", "none", "adamw", marks=pytest.mark.long),
        ("Llama-3.1-8B", 2, "full", "int8", "adamw"),
        pytest.param("Llama-3.1-8B", 2, "full", "none", "adamw_rounded", marks=pytest.mark.long),
    ],
)
def test_full_fine_tuning(
    name: str, layers: int, policy: Checkpointing, reference: ReferenceKind, optimizer: OptimizerKind
) -> None:
    shape = replace(SHAPES[name], layers=layers)
    settings: dict[str, Any] = {"mode": "full", "checkpointing": policy, "token_budget": 3396}
    settings["optimizer"] = {"kind": optimizer}
    settings["loss"] = {"beta": 0.04 if reference != "none" else 0}
    kind = "int8" if reference == "int8" else "auto"
    groups = [(256, [786] * 4), (257, [785] * 4)]
    fake = footprint(shape, LearnerConfig.model_validate(settings), groups, reference_dtype=kind)
    learning = Learning(mode="full", checkpointing=policy, reference=reference, optimizer=optimizer)
    static = learner_static(shape, learning)
    assert static["weights"] + static["reference"] == pytest.approx(fake.weights, rel=0.01)
    predicted = total(learner_static(shape, learning), step_bytes(shape, learning, Micro.of(256, 786, 4, 3396)))
    assert predicted == pytest.approx(fake.peak, rel=0.02)


@pytest.mark.parametrize(
    ("name", "mode", "policy"),
    [
        ("SmolLM2-135M", "lora", "full"),  # where the head is the peak
        pytest.param("Qwen2.5-0.5B", "lora", "none", marks=pytest.mark.long),
        pytest.param("Qwen2.5-0.5B", "full", "none", marks=pytest.mark.long),
    ],
)
def test_a_larger_teachers_likeliest_tokens(name: str, mode: Any, policy: Checkpointing) -> None:
    """What a step takes beside weights, and what they add to it, of which a reference's pass is no part."""
    shape, loss = replace(SHAPES[name], layers=8), {"beta": 1, "teacher_top": 20}
    settings = {"mode": mode, "checkpointing": policy, "token_budget": 3396}
    groups, micro = [(256, [786] * 4), (257, [785] * 4)], Micro.of(256, 786, 4, 3396)
    fakes = [footprint(shape, LearnerConfig.model_validate(settings | {"loss": one}), groups) for one in ({}, loss)]
    none, most = (step_bytes(shape, Learning(mode=mode, checkpointing=policy, top=top), micro) for top in (0, 20))
    assert total(most) == pytest.approx(fakes[1].dynamic, rel=0.01)
    added = fakes[1].dynamic - fakes[0].dynamic
    assert added == pytest.approx(total(most) - total(none), rel=0.25, abs=2**20)
    assert VOCAB_TILE == logprob.VOCAB_TILE


@pytest.mark.long
@pytest.mark.parametrize(("name", "policy"), [("Llama-3.2-1B", "none"), ("SmolLM2-1.7B", "full")])
def test_completions_that_end_early_under_long_prompts(name: str, policy: Checkpointing) -> None:
    """They gather more keys per token than those the plan is made for: the model is still the step, and what is
    stated as the bound holds."""
    shape, prompt, count, budget = replace(SHAPES[name], layers=4), 1000, 8, 4096
    learning = Learning(checkpointing=policy)
    planned = Micro.of(prompt, 300, count, budget)
    bound = replace(planned, keys=(1 + count) * planned.tokens)
    highest = total(learner_static(shape, learning), step_bytes(shape, learning, bound))
    settings = LearnerConfig.model_validate({"checkpointing": policy, "token_budget": budget})
    for length in (40, 2):
        groups = budget // (prompt + count * (length - 1))
        micro = Micro(
            groups * (prompt + count * (length - 1)),
            groups * count * length,
            groups * (prompt + count * (prompt + length - 1)),
        )
        # Prompts that differ, or they would be one group.
        fake = footprint(shape, settings, [(prompt - i, [length] * count) for i in range(groups + 2)])
        predicted = total(learner_static(shape, learning), step_bytes(shape, learning, micro))
        assert predicted == pytest.approx(fake.peak, rel=0.02)
        assert fake.peak <= highest


# The memory model of a base in shards: by hand, and that a plan counts it.

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
