"""Gated delta rule layers (Qwen3-Next, Qwen3.5; Yang et al., 2412.06464) in float32 on vLLM's CPU backend.

vLLM's own kernels for a CPU take bfloat16 alone. Here such a layer is computed in float32 by transformers' torch code,
with which the learner computes it, too: decoding sequences together, a token each, and prompts one after the other, in
chunks. vLLM keeps the states of convolution and recurrence in its cache, by slots. Read in vLLM 0.32
(model_executor/layers/mamba/ops/cpu/gdn_attention.py).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus


def install_float32_gated_delta() -> None:
    """Has layers with inputs in float32 computed here; others are left to vLLM. To be called before the engine is
    built, since vLLM registers its operator then."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    home: Any = gdn_attention
    upstream = home.cpu_gdn_attention_core
    if hasattr(upstream, "gleaner"):
        return

    def core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: Any) -> None:
        if mixed_qkv.dtype != torch.float32:
            upstream(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        context = home.get_forward_context()
        layer = context.no_compile_layers[home._resolve_layer_name(layer_name)]
        if context.attn_metadata is not None:
            _layer(home, layer, context.attn_metadata[layer.prefix], (mixed_qkv, b, a), core_attn_out)

    core.gleaner = True  # type: ignore[attr-defined]
    core.__signature__ = inspect.signature(upstream, eval_str=True)  # type: ignore[attr-defined]
    home.cpu_gdn_attention_core = core


def _layer(home: Any, layer: Any, batch: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    """Computes one layer for the tokens of a step: first those of decoding sequences, then those of prompts.

    inputs: [T, queries + keys + values], [T, heads] b and [T, heads] a. output: [T, heads, width], written in place.
    """
    decodes, prompts = batch.num_decodes, batch.num_prefills
    starts, slots = batch.non_spec_query_start_loc.tolist(), batch.non_spec_state_indices_tensor
    if decodes:
        output[:decodes] = _sequences(home, layer, [one[:decodes, None] for one in inputs], slots[:decodes])[:, 0]
    for i in range(decodes, decodes + prompts):
        rows = slice(starts[i], starts[i + 1])
        if not batch.has_initial_state[i]:
            for cache in (_convolved(home, layer), home._ssm_state_view(layer)):
                cache[slots[i]] = 0
        output[rows] = _sequences(home, layer, [one[None, rows] for one in inputs], slots[i : i + 1])[0]


def _convolved(home: Any, layer: Any) -> Tensor:
    """[slots, channels, width - 1]: the convolution's last inputs, a view of the cache."""
    cache: Tensor = layer.kv_cache[0]
    return cache if home.is_conv_state_dim_first() else cache.transpose(-1, -2)


def _sequences(home: Any, layer: Any, inputs: list[Tensor], slots: Tensor) -> Tensor:
    """[N, L, heads, width]: N sequences of L tokens, from their states in the cache, which are moved on."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as of_transformers

    mixed, b, a = inputs
    weight, past, memory = home._unpacked_conv_weight(layer), _convolved(home, layer), home._ssm_state_view(layer)
    wide = torch.cat([past[slots].to(mixed.dtype), mixed.transpose(1, 2)], 2)
    past[slots] = wide[:, :, -(weight.shape[1] - 1) :].to(past.dtype)
    mixed = silu(conv1d(wide, weight[:, None], layer.conv1d.bias, groups=len(weight))).transpose(1, 2)
    count, length = mixed.shape[:2]
    parts = layer.rearrange_mixed_qkv(mixed.flatten(0, 1))
    query, key, value = (part.reshape(count, length, *part.shape[-2:]) for part in parts)
    shared = value.shape[2] // query.shape[2]  # how many heads of values share a key
    query, key = (part.repeat_interleave(shared, 2) for part in (query, key))
    decay = -layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias)
    rule: Any = of_transformers.torch_recurrent_gated_delta_rule
    rule = rule if length == 1 else of_transformers.torch_chunk_gated_delta_rule
    found, state = rule(
        query, key, value, g=decay, beta=b.sigmoid(), initial_state=memory[slots].float(), output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    memory[slots] = state.to(memory.dtype)
    result: Tensor = found
    return result
