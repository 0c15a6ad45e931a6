"""Packed rows: the gradient is that of one completion at a time, for every kind of model; or they are not used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface

from learner.batch import micro_batch
from learner.batch.layout import Layout, Segment
from learner.batch.micro_batch import Rows, micro_batches
from learner.model import attention, packing_check
from learner.model.attention import attend_tiles, kernels
from learner.model.logprob import policy_logprobs
from learner.model.packing_check import Difference
from tests.learner.model.test_policy import make_policy, save_model

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large, so that attention matters
}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen2-sliding": transformers.Qwen2Config(**SMALL, **SLIDING, use_sliding_window=True),
    "qwen3": transformers.Qwen3Config(**SMALL),
    "gemma": transformers.GemmaConfig(**SMALL),
    "gemma2": transformers.Gemma2Config(
        **SMALL, query_pre_attn_scalar=8, sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": transformers.Gemma3TextConfig(**SMALL, **SLIDING),
    "granite": transformers.GraniteConfig(**SMALL, logits_scaling=4.0, attention_multiplier=0.4),
    "cohere": transformers.CohereConfig(**SMALL, logit_scale=0.3),
    "gpt-oss": transformers.GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    "gpt-oss-wide": transformers.GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, sliding_window=400),
    "mistral-narrow": transformers.MistralConfig(**SMALL, sliding_window=5),  # shorter than the prompt
    "mistral-between": transformers.MistralConfig(**SMALL, sliding_window=12),
    "mistral-wide": transformers.MistralConfig(**SMALL, sliding_window=400),
}


def make_rows() -> Rows:
    """Two families, of 7 and 9 prompt tokens; one of their completions is longer than a block of segments."""
    rng = np.random.default_rng(3)
    prompts, lengths = [rng.integers(0, 64, n).astype(np.int32) for n in (7, 9)], np.array([5, 160, 1, 12, 30, 9])
    tokens = rng.integers(0, 64, lengths.sum()).astype(np.int32)
    behavior, versions = np.zeros(len(tokens), np.float32), np.zeros_like(tokens)
    return Rows([], [prompts[i] for i in (0, 0, 0, 1, 1, 1)], tokens, behavior, versions, lengths, lengths < 0)


def gradients(policy: Any, rows: Rows, budget: int, *, packed: bool) -> tuple[Tensor, Tensor]:
    """(logprobs, gradient of a weighted sum of them to all of the adapter), in the order of the rows."""
    numbers = np.arange(len(rows.lengths), dtype=np.float64)
    advantages = np.repeat(numbers, rows.lengths)
    batches = micro_batches(rows, advantages, numbers, np.ones(len(numbers), dtype=bool), budget, packed=packed)
    policy.clear_gradients()
    parts = []
    for batch in batches:
        logprobs, _ = policy_logprobs(policy.predicting(batch), policy.head, batch.targets, 0.8, logits=policy.logits)
        torch.autograd.backward(logprobs, torch.cos(3 * batch.advantages + 1))
        parts.append((batch.advantages, logprobs.detach()))
    order = torch.cat([numbers for numbers, _ in parts]).argsort(stable=True)
    grads = [m.grad.flatten() for m in policy.masters.values()]
    return torch.cat([logprobs for _, logprobs in parts])[order], torch.cat(grads)


def random_adapter(policy: Any, size: float = 0.2) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for master in policy.masters.values():
            master.copy_(size * torch.randn_like(master))
    policy.sync()


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        *((name, "none") for name in CONFIGS),
        *((name, "full") for name in ("llama", "qwen2-sliding", "gemma2", "gpt-oss")),
    ],
)
def test_packed_gradient_is_that_of_one_row_at_a_time(name: str, checkpointing: str, tmp_path: Path) -> None:
    """The reference is the same model in transformers' own attention, without padding."""
    path = save_model(CONFIGS[name], tmp_path)
    policy = make_policy(path, checkpointing=checkpointing)
    assert policy.packed
    random_adapter(policy)
    rows = make_rows()
    found, found_grad = gradients(policy, rows, 10_000, packed=True)
    split, split_grad = gradients(policy, rows, 180, packed=True)
    policy._lm.set_attn_implementation("eager")
    wanted, wanted_grad = gradients(policy, rows, 1, packed=False)
    for logprobs, grad in ((found, found_grad), (split, split_grad)):
        assert (logprobs - wanted).abs().max() < 2e-4
        assert (grad - wanted_grad).norm() < 1e-5 * wanted_grad.norm()


def test_unpacked_rows_keep_their_sliding_window(tmp_path: Path) -> None:
    policy = make_policy(save_model(CONFIGS["mistral-narrow"], tmp_path))
    window = policy._lm.config.sliding_window
    rows = [torch.arange(3, 3 + length)[None] for length in (30, window, window + 1)]
    with torch.no_grad():
        found = [policy.hidden(ids) for ids in rows]
        policy._lm.set_attn_implementation("sdpa")
        for states, ids in zip(found, rows, strict=True):
            assert torch.allclose(states, policy.hidden(ids), atol=1e-5)


Seen = Callable[[Tensor, list[Segment]], None]


def kernel(change: Seen) -> Any:
    """An attention in the place of attend_tiles whose mask, [N, N] of queries and keys, `change` has put wrong."""

    def attend(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, sinks: None) -> Tensor:
        seen = torch.zeros(query.shape[2], query.shape[2], dtype=torch.bool)
        for own in layout.segments:
            seen[own.start : own.stop, own.prefix_start : own.prefix_stop] = True
            seen[own.start : own.stop, own.start : own.stop] = torch.ones(
                own.stop - own.start, own.stop - own.start
            ).tril()
        change(seen, [own for own in layout.segments if own.prefix_stop > own.prefix_start])
        grouped = query.shape[1] != key.shape[1]
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=scale, enable_gqa=grouped
        )
        return output.transpose(1, 2)

    return attend


def nothing(seen: Tensor, completions: list[Segment]) -> None:
    pass


def next_sees_one(seen: Tensor, completions: list[Segment]) -> None:
    seen[completions[1].start : completions[1].stop, completions[0].stop - 1] = True


def last_token_sees_another_group(seen: Tensor, completions: list[Segment]) -> None:
    seen[completions[-1].stop - 1, completions[0].start] = True


def one_of_the_prompt_is_unseen(seen: Tensor, completions: list[Segment]) -> None:
    seen[completions[-1].start : completions[-1].stop, completions[-1].prefix_stop - 1] = False


def shifted(first: int, tokens: slice) -> Any:
    """micro_batch._pack with the positions of some tokens of a completion one too high."""
    pack = micro_batch._pack

    def wrong(rows: Rows, parts: Any) -> Any:
        ids, index, positions, layout = pack(rows, parts)
        own = [one for one in layout.segments if one.prefix_stop > one.prefix_start][first]
        positions[0, own.start : own.stop][tokens] += 1
        return ids, index, positions, layout

    return wrong


def policy_with(monkeypatch: pytest.MonkeyPatch, folder: Path, dtype: str, **wrong: Any) -> Any:
    monkeypatch.setattr(attention, "attend_tiles", wrong.get("kernel", attend_tiles))
    monkeypatch.setattr(micro_batch, "_pack", wrong.get("pack", micro_batch._pack))
    return make_policy(save_model(transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 6}), folder), dtype=dtype)


TYPES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kernel": kernel(next_sees_one)}, ""),
        ({"kernel": kernel(last_token_sees_another_group)}, ""),
        ({"kernel": kernel(one_of_the_prompt_is_unseen)}, "rows differ by"),
        ({"pack": shifted(0, slice(None))}, "rows differ by"),
        ({"pack": shifted(-1, slice(-1, None))}, "rows differ by"),
    ],
    ids=[
        "a leaked token",
        "a leak to the last token",
        "an unseen token",
        "a shifted completion",
        "one shifted position",
    ],
)
def test_a_wrong_packing_is_refused_in_each_type(
    wrong: Any,
    message: str,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    assert not policy_with(monkeypatch, tmp_path, dtype, **wrong).packed
    assert message in caplog.text


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wrong", [{}, {"kernel": kernel(nothing)}], ids=["tiles", "another kernel"])
def test_what_rounding_explains_is_packed_in_each_type(
    wrong: Any, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing is tolerated unmeasured: then the rounding of this model in this type decides."""
    torch.manual_seed(0)
    assert policy_with(monkeypatch, tmp_path, dtype, **wrong).packed
    monkeypatch.setattr(packing_check, "TOLERANCE", {getattr(torch, name): Difference(0, 0, 0) for name in TYPES})
    assert policy_with(monkeypatch, tmp_path, dtype, **wrong).packed


@pytest.mark.parametrize("backward", ["leaks", "is right"])
def test_a_gradient_that_leaks_is_found_though_the_logprobs_are_right(
    backward: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel whose backward pass alone, which is code of its own, takes a little of one completion for another's."""

    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, key: Tensor) -> Tensor:
            return key.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad + 1e-7 * grad.roll(1, 2) if backward == "leaks" else grad.clone()

    def mixed(query: Tensor, key: Tensor, *others: Any) -> Tensor:
        return attend_tiles(query, Mixed.apply(key), *others)

    assert policy_with(monkeypatch, tmp_path, "float32", kernel=mixed).packed is (backward == "is right")
    assert ("must not see: 0.0e+00 nats of their logprobs" in caplog.text) is (backward == "leaks")


def assert_padded(config: Any, folder: Path, caplog: pytest.LogCaptureFixture, message: str) -> None:
    with caplog.at_level(logging.WARNING, "learner.model.packing_check"):
        policy = make_policy(save_model(config, folder))
    assert not policy.packed
    assert policy._lm.config._attn_implementation in ("sdpa", "eager")
    (record,) = [r for r in caplog.records if r.name == "learner.model.packing_check"]
    assert record.getMessage().startswith(f"{config.model_type} cannot be packed (")
    assert message in record.getMessage()
    logprobs, grad = gradients(policy, make_rows(), 100, packed=policy.packed)
    assert torch.isfinite(logprobs).all()
    assert grad.norm() > 0


def test_a_kernel_that_ignores_segments_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def ignore(query: Tensor, key: Tensor, value: Tensor, layout: Any, scale: float, sinks: None) -> Tensor:
        return attention._plain(query, key, value, scale, None)

    monkeypatch.setattr(attention, "attend_tiles", ignore)
    assert_padded(CONFIGS["llama"], tmp_path, caplog, "rows differ by")


@pytest.mark.parametrize(
    "given", [{"s_aux": torch.zeros(2, requires_grad=True)}, {"s_aux": torch.zeros(2), "softcap": 2.0}]
)
def test_sinks_that_are_trained_or_stand_beside_a_cap_are_not_packed(given: dict[str, Any]) -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="^sinks are packed if they are not trained, and"):
        AttentionInterface()[attention.SEGMENTS](torch.nn.Identity(), states, states, states, None, **given)


def test_a_kernel_that_ignores_sinks_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "attend_tiles", lambda *given: attend_tiles(*given[:5]))
    assert_padded(CONFIGS["gpt-oss-wide"], tmp_path, caplog, "rows differ by")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4), "cannot be exchanged"),
        (
            transformers.PhimoeConfig(**SMALL, sliding_window=64, num_local_experts=2),
            "a window of 64 that its attention",
        ),
    ],
    ids=["no interface", "window in the mask"],
)
def test_a_model_that_cannot_is_padded(
    config: Any, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_padded(config, tmp_path, caplog, message)


def test_blocks_join_the_segments_of_a_prefix_up_to_its_length() -> None:
    shorts = [Segment(500 + 100 * i, 600 + 100 * i, 0, 250) for i in range(3)]
    layout = Layout([Segment(0, 250), Segment(250, 500, 0, 250), *shorts, Segment(800, 810)])
    assert [(block.prefix, block.lengths) for block in layout.blocks] == [
        (None, [250]), (0, [250]), (0, [100, 100]), (0, [100]), (None, [10]),
    ]  # fmt: skip
    assert sum(layout.sizes) == 810


def plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor, k_ends: Tensor, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """What torch.nn.attention.varlen documents: segments apart, bottom-right aligned, (left, 0) keys around the own."""
    assert window_size[1] == 0
    assert (max_q, max_k) == (int(q_ends.diff().max()), int(k_ends.diff().max()))
    assert enable_gqa == (q.shape[1] != k.shape[1])
    outputs = []
    for s in range(len(q_ends) - 1):
        queries, keys, values = q[q_ends[s] : q_ends[s + 1]], k[k_ends[s] : k_ends[s + 1]], v[k_ends[s] : k_ends[s + 1]]
        place = torch.arange(len(queries))[:, None] + len(keys) - len(queries) - torch.arange(len(keys))
        seen = (place >= 0) & ((place <= window_size[0]) | (window_size[0] < 0))
        keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def without_groups(*tensors: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
    """torch 2.11's, which is not asked for grouped heads, and takes them."""
    grouped = tensors[0].shape[1] != tensors[1].shape[1]
    return plain_varlen(*tensors, scale=scale, window_size=window_size, enable_gqa=grouped)


@pytest.mark.parametrize("asks_for_groups", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_both_kernels_are_the_plain_attention(
    window: int | None, kv_heads: int, asks_for_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the CUDA kernel, so that what it is given is tested here; torch 2.11 has no enable_gqa."""
    monkeypatch.setattr(attention, "varlen_attn", plain_varlen if asks_for_groups else without_groups)
    monkeypatch.setattr(attention, "ASKS_FOR_GROUPS", asks_for_groups)
    layout = Layout([Segment(0, 4), Segment(4, 7, 0, 4), Segment(7, 8, 0, 4), Segment(8, 13)])
    seen = torch.zeros(13, 13, dtype=torch.bool)
    for own in layout.segments:
        for query in range(own.start, own.stop):
            keys = [*range(own.prefix_start, own.prefix_stop), *range(own.start, query + 1)]
            seen[query, keys[-window:] if window else keys] = True
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 13, 8) for heads in (4, kv_heads, kv_heads))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    for kernel in (attention._by_segments, attention._by_varlen):
        assert torch.allclose(kernel(q, k, v, layout, 0.3, window).transpose(1, 2), wanted, atol=1e-6)


def test_capped_attention_is_the_plain_formula_over_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERIES", 5)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 13, 8, requires_grad=True) for heads in (4, 2, 2))
    keys, values = (t.repeat_interleave(2, 1) for t in (k, v))
    for window in (None, 4):
        found = attention._plain(q, k, v, 0.7, window, cap=0.5)
        scores = 0.5 * (0.7 * torch.einsum("bhqd,bhkd->bhqk", q, keys) / 0.5).tanh()
        distance = torch.arange(13)[:, None] - torch.arange(13)
        unseen = (distance < 0) | (distance >= (window or 13))
        wanted = (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).transpose(1, 2)
        assert torch.allclose(found, wanted, atol=1e-6)
        weights = torch.randn_like(wanted)
        for one, other in zip(*(torch.autograd.grad(t, (q, k, v), weights) for t in (found, wanted)), strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def test_the_kernel_follows_device_and_type() -> None:
    assert kernels(torch.device("cpu"), torch.bfloat16) == [attention.SEGMENTS]
