"""Tiny random checkpoints that hold a vision or audio tower beside their text part, laid out as their families' files
are: text settings in text_config, and the tensors' names that the hub's files have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.random_families import TINY
from examples.random_model import EOS_IDS, make_tokenizer

VOCABULARY = 320  # room for the special ids of images behind the tokenizer's
TEXT = {**TINY, "vocab_size": VOCABULARY}
IMAGE_IDS = {"image_token_id": 300, "video_token_id": 303, "vision_start_token_id": 301, "vision_end_token_id": 302}
QWEN_TOWER = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
TOWER = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]}
# A scale of queries that grows beyond the original length, as Ministral 3 has it.
SCALED = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
WINDOWS = ["sliding_attention", "full_attention"]
DELTA_RULE = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}  # fmt: skip
GEMMA4 = {
    "num_hidden_layers": 4, "sliding_window": 16, "global_head_dim": 64, "layer_types": WINDOWS * 2,
    "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": VOCABULARY,
}  # fmt: skip
GEMMA4_OUTSIDE = {
    "vision_config": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "position_embedding_size": 64,
    },
    "audio_config": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 64},
    "boi_token_id": 301, "eoi_token_id": 302, "image_token_id": 300, "video_token_id": 303, "boa_token_id": 304,
    "eoa_token_index": 305, "audio_token_id": 306,
}  # fmt: skip
GEMMA3_OUTSIDE = {
    "vision_config": TOWER, "mm_tokens_per_image": 4, "image_token_index": 300, "boi_token_index": 301,
    "eoi_token_index": 302,
}  # fmt: skip
PIXTRAL = {"vision_config": {"model_type": "pixtral", **TOWER, "head_dim": 32}, "image_token_index": 300}
LLAMA4_TOWER = {
    **TOWER, "intermediate_size": 256, "num_hidden_layers": 1, "vision_output_dim": 64, "projector_input_dim": 64,
    "projector_output_dim": 64,
}  # fmt: skip

# name -> (model_type, settings of text_config, all others); transformers saves under the names of the hub's files
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3", {"query_pre_attn_scalar": 32, "sliding_window": 16, "layer_types": WINDOWS}, GEMMA3_OUTSIDE,
    ),
    "gemma4": (
        "gemma4",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16},
        GEMMA4_OUTSIDE,
    ),
    "gemma4_dense": (
        "gemma4",
        {**GEMMA4, "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0,
         "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        GEMMA4_OUTSIDE,
    ),
    "mistral3": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": None},
        {**PIXTRAL, "spatial_merge_size": 2, "tie_word_embeddings": False},
    ),
    "ministral3": (
        "mistral3", {"model_type": "ministral3", "tie_word_embeddings": True, "rope_parameters": SCALED},
        {**PIXTRAL, "spatial_merge_size": 2, "tie_word_embeddings": True},
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl", {"tie_word_embeddings": True, "rope_parameters": SECTIONS, "use_sliding_window": False},
        {"vision_config": {**QWEN_TOWER, "fullatt_block_indexes": [0]}, "tie_word_embeddings": True, **IMAGE_IDS},
    ),
    "qwen3_vl": (
        "qwen3_vl", {"tie_word_embeddings": True, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}},
        {"vision_config": {**QWEN_TOWER, "deepstack_visual_indexes": [0]}, "tie_word_embeddings": True, **IMAGE_IDS},
    ),
    "qwen3_5": (
        "qwen3_5", {**DELTA_RULE, "tie_word_embeddings": True},
        {"vision_config": QWEN_TOWER, "tie_word_embeddings": True, **IMAGE_IDS},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {**DELTA_RULE, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4,
         "num_experts_per_tok": 2, "tie_word_embeddings": False},
        {"vision_config": QWEN_TOWER, "tie_word_embeddings": False, **IMAGE_IDS},
    ),
    "llava": (
        "llava", {"model_type": "llama"},
        {"vision_config": {"model_type": "clip_vision_model", **TOWER}, "image_token_index": 300},
    ),
    "glm4v": (
        "glm4v",
        {"rope_parameters": {**SECTIONS, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5}},
        {"vision_config": QWEN_TOWER, **IMAGE_IDS},
    ),
    "llama4": (
        "llama4",
        {"num_hidden_layers": 4, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
         "interleave_moe_layer_step": 1, "attention_chunk_size": 64, "no_rope_layers": [1, 1, 1, 0],
         "use_qk_norm": True, "tie_word_embeddings": False},
        {"vision_config": LLAMA4_TOWER, "image_token_index": 300, "boi_token_index": 301, "eoi_token_index": 302},
    ),
}  # fmt: skip


def make_checkpoint(path: Path, name: str, *, seed: int = 0) -> Path:
    """Writes a random checkpoint (float32) with its tokenizer under path and returns path. Norms are not all alike, and
    Qwen3.5's have the layer for multi-token prediction that its files have."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING as CLASSES

    hf: Any = transformers
    kind, text, others = CHECKPOINTS[name]
    config = AutoConfig.for_model(kind, text_config={**TEXT, **text}, **others)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_class: Any = CLASSES[type(config)]
        model = model_class(config).float()
        with torch.no_grad():
            for key, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.add_(0.1 * torch.randn_like(weight))
                elif "experts" in key or "embed_tokens_per_layer" in key:  # transformers leaves some of these at 0
                    weight.normal_(0, 0.1)
        extra = {"mtp.norm.weight": torch.randn(64), "mtp.fc.weight": torch.randn(64, 128)} if "qwen3_5" in name else {}
    model.generation_config = hf.GenerationConfig(eos_token_id=list(EOS_IDS), pad_token_id=259)
    model.save_pretrained(path)
    if extra:
        file = path / "model.safetensors"
        save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    make_tokenizer().save_pretrained(path)
    return path
