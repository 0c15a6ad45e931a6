"""Tiny random models of the architectures whose logits, experts, fused layers or positions are not those of a Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.random_model import EOS_IDS, VOCAB_SIZE, make_tokenizer

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM on a CPU takes no narrower one
    "max_position_embeddings": 512,
    "initializer_range": 0.1,  # large, so that distributions are far from uniform
    "bos_token_id": None,
    "eos_token_id": EOS_IDS[0],
    "pad_token_id": 259,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + i / 8 for i in range(16)],
    "long_factor": [2.0 + i for i in range(16)],
}

# name -> (config class, class of the model, settings): small caps and scales far from 1, so that leaving one out shows
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"query_pre_attn_scalar": 32, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0, **WINDOWS},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"query_pre_attn_scalar": 32, **WINDOWS}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1},
    ),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.25}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    ),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"original_max_position_embeddings": 512}),
    "phi3_longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"original_max_position_embeddings": 512, "max_position_embeddings": 2048, "rope_parameters": LONGROPE},
    ),
}


def make_family(path: Path, name: str, *, seed: int = 0) -> Path:
    """Writes a random model (float32) with its tokenizer under path and returns path. Norms are not all alike."""
    import torch
    import transformers

    hf: Any = transformers  # its constructors carry no annotations
    config_class, model_class, settings = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(hf, model_class)(getattr(hf, config_class)(**TINY | settings))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 1:
                    weight.add_(0.1 * torch.randn_like(weight))
    model.generation_config = hf.GenerationConfig(eos_token_id=list(EOS_IDS), pad_token_id=259)
    model.float().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path
