"""The architectures of docs/model_tables.md, each as the config of a tiny random model."""

from __future__ import annotations

from typing import Any

from examples.random_families import FAMILIES, TINY

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
WINDOWS = FAMILIES["gemma3"][2]
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 2,
}  # fmt: skip
GPT: dict[str, Any] = {
    "vocab_size": TINY["vocab_size"], "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 512, "n_inner": 96,
    "initializer_range": 0.1,
}  # fmt: skip

# model_type -> what its config needs beside TINY, or GPT where it has names of its own
ROWS: dict[str, dict[str, Any]] = {
    "afmoe": EXPERTS | WINDOWS,
    "apertus": {},
    "arcee": {},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 2, "vocab_size": 260, "initializer_range": 0.1},
    "cohere": FAMILIES["cohere"][2],
    "cohere2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v2": ROUTED | LATENT,
    "deepseek_v3": ROUTED | LATENT,
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
    "exaone4": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone_moe": EXPERTS | WINDOWS,
    "falcon": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 260, "ffn_hidden_size": 96,
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16},
    "falcon_mamba": {"state_size": 8},
    "flex_olmo": EXPERTS,
    "gemma": {},
    "gemma2": FAMILIES["gemma2"][2],
    "gemma3_text": FAMILIES["gemma3"][2],
    "gemma4_text": WINDOWS
    | {
        "global_head_dim": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 260,
        "num_kv_shared_layers": 0,
    },
    "glm": {},
    "glm4": FAMILIES["glm4"][2],
    "glm4_moe": ROUTED,
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neox": {},
    "gpt_oss": FAMILIES["gpt_oss"][2],
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 16, "n_positions": 512},
    "granite": FAMILIES["granite"][2],
    "granite_swa": WINDOWS,
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "logits_scaling": 4.0},
    "granitemoe_swa": LOCAL | WINDOWS,
    "granitemoeshared": LOCAL | {"shared_intermediate_size": 48},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hyperclovax": {"logits_scaling": 4.0},
    "jais2": {},
    "jamba": {
        "mamba_d_state": 8, "mamba_dt_rank": 8, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
        "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama": {},
    "llama4_text": {
        "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "attention_chunk_size": 8,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "expand": 2},
    "minimax": {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
    "minimax_m2": LOCAL,
    "ministral3": {},
    "mistral": {"sliding_window": 16},
    "mixtral": FAMILIES["mixtral"][2],
    "nemotron": {},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16,
        "n_groups": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo_hybrid": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {},
    "phi3": FAMILIES["phi3"][2],
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3": {},
    "qwen3_moe": FAMILIES["qwen3_moe"][2],
    "qwen3_next": EXPERTS | {
        "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 48,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 16, "block_types": ["recurrent", "attention"]},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {"query_pre_attn_scalar": 32, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0},
    "zamba2": {
        "mamba_d_state": 16, "n_mamba_heads": 4, "mamba_ngroups": 1, "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1, "attention_head_dim": 64,
    },
}  # fmt: skip

# Refused by their config.json, so that no model is made: model_type -> class
BY_CONFIG = {
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
}
