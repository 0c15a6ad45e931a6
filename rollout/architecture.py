"""Tells from a model's config.json whether and how it can be trained and served, for generators and learner alike.

Nothing of the model but its config.json is read.
"""

from collections.abc import Mapping
from typing import Any

from cluster.errors import WrongInput

# Names that vLLM and transformers share. In a model with experts only these layers get adapters, and the experts if
# learner.lora.targets names them (learner.model.experts). On a CPU vLLM gets those merged: it has no LoRA for them.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
OTHER_INPUTS = ("vision_config", "audio_config", "speech_config")
CAUSAL = ("ForCausalLM", "LMHeadModel")  # how names of classes of causal language models end
VOCABULARY = 64  # vLLM pads embeddings to a multiple of this number (DEFAULT_VOCAB_PADDING_SIZE)
# Model types of text parts without a causal class of their own -> the model that computes the same. The position of a
# token of text has three equal coordinates there (Qwen2-VL, 2409.12191, section 2.1), which is rotary embedding as it
# always is.
SAME_OF_TEXT = {
    "glm4v_text": "glm4",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")  # model types that vLLM refuses in float16 (config/model.py)
STATES = ("mamba_", "ssm_", "conv_", "linear_conv", "linear_attn", "lru_")  # prefixes of settings for layers' states
# Model types whose layers with a state are computed on a CPU: Mamba-2 by vLLM's kernels, the gated delta rule by vLLM's
# in bfloat16 and by rollout.vllm.gated_delta in float32.
STATES_ON_CPU = ("nemotron_h", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
TRANSPOSED = ("gpt2", "openai-gpt")  # model types whose layers are Conv1D, not nn.Linear


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for text, which a model with several kinds of input keeps in text_config."""
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, Mapping) else {})}  # rollout.data.chat refuses another kind


def other_inputs(config: Mapping[str, Any]) -> list[str]:
    """The kinds of input that the model takes beside text: vision, audio, speech."""
    return [name.removesuffix("_config") for name in OTHER_INPUTS if config.get(name)]


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the model's feed-forward blocks are mixtures of experts."""
    text = text_of(config)
    return any((text.get(name) or 0) > 1 for name in EXPERTS)


def check_causal(config: Mapping[str, Any], path: str, key: str = "model.path") -> None:
    """Raises WrongInput if a model with this config.json is no causal language model, and has none as its text part.
    key: the setting that names the model."""
    kind = config.get("model_type")
    others = other_inputs(config)
    text = config.get("text_config")
    named = (isinstance(text, Mapping) and bool(text.get("model_type"))) or f"{kind}_text" in SAME_OF_TEXT
    classes = config.get("architectures") or ()
    causal = any(name.endswith(CAUSAL) for name in classes)
    wrong = {
        f"takes {' and '.join(others)} beside text and names no text part (text_config)": bool(others) and not named,
        "is an encoder and a decoder": bool(config.get("is_encoder_decoder")),
        f"is a {', '.join(classes)}": bool(classes) and not causal and not others,
    }
    for what, is_so in wrong.items():
        if is_so:
            raise WrongInput(
                f"{key}: must be a causal language model, or hold one as its text part, and {path} (model_type "
                f"{kind}) {what}; give another model (docs/models.md)"
            )


def check_architecture(config: Mapping[str, Any], path: str, *, lora: bool) -> None:
    """Raises WrongInput if a model with this config.json cannot be trained here.

    Args:
        lora: whether an adapter is trained, and not the whole model.
    """
    kind = config.get("model_type")
    check_causal(config, path)
    if kind in TRANSPOSED:
        why = "which vLLM serves without LoRA" if lora else "whose weights vLLM holds transposed: unreadable for proofs"
        raise WrongInput(
            f"model.path: must have nn.Linear layers, and those of {path} (model_type {kind}) are Conv1D, {why}; give "
            "another architecture (docs/models.md)"
        )
    if not lora and has_experts(config):
        raise WrongInput(
            f"learner.mode: full is not for models with experts ({path}, model_type {kind}): the learner holds them "
            "fused and vLLM loads them one by one, under other names; set learner.mode=lora"
        )


def has_states(config: Mapping[str, Any]) -> bool:
    """Whether some layers carry a state along: Mamba, linear attention, convolutions. A model of a hybrid family may
    have attention layers only (granite-4.0-micro)."""
    text = text_of(config)
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds and all(str(kind).endswith("attention") for kind in kinds):
        return any(str(kind).startswith("linear") for kind in kinds)
    return any(name.startswith(STATES) for name in text)


def check_on_cpu(
    config: Mapping[str, Any], path: str, key: str = "model.path", gpus: str = "cluster.gpus.generator"
) -> None:
    """Raises WrongInput if vLLM cannot generate with the model on a CPU, where it lacks kernels for most layers with a
    state. key, gpus: the settings that name the model and its cards."""
    if has_states(config) and text_of(config).get("model_type") not in STATES_ON_CPU:
        raise WrongInput(
            f"{key}: {path} (model_type {config.get('model_type')}) has layers that carry a state along (Mamba, "
            "linear attention, convolutions), with which vLLM generates on a card alone, but for "
            f"{', '.join(STATES_ON_CPU)}; give another model, or a card ({gpus}; docs/models.md)"
        )


def check_type(config: Mapping[str, Any], path: str, dtype: str) -> None:
    """Raises WrongInput if vLLM does not compute the model in this dtype."""
    kind = config.get("model_type")
    if dtype == "float16" and kind in NO_FLOAT16:
        raise WrongInput(
            f"model.dtype: must be bfloat16 or float32 for {path} (model_type {kind}), whose values leave float16's "
            "range, got float16; on a card without bfloat16 set float32 and learner.push=merged, or give another model"
        )


def check_shards(config: Mapping[str, Any], path: str, shards: int, divided: str | None = None) -> None:
    """Raises WrongInput if the model cannot be divided evenly among `shards` processes, with whole heads in each.
    divided: setting and processes, as the message begins; None: those of a generator."""
    text = text_of(config)
    heads = text.get("num_attention_heads") or text.get("n_head")
    counts = {
        "attention heads": heads,
        "key and value heads": text.get("num_key_value_heads") or heads,
        "units of a feed-forward block": text.get("intermediate_size"),
        "rows of embeddings, as vLLM pads them": -(-(text.get("vocab_size") or 0) // VOCABULARY) * VOCABULARY,
    }
    divided = divided or f"cluster.tensor_parallel: a generator of {shards} processes (cluster.gpus.generator)"
    uneven = {name: count for name, count in counts.items() if isinstance(count, int) and count % shards}
    if uneven:
        told = ", ".join(f"{count} {name}" for name, count in uneven.items())
        raise WrongInput(
            f"{divided} must divide the model's parts evenly, and {path} has {told}; take a number that divides them"
        )


def check_length(config: Mapping[str, Any], path: str, tokens: int) -> None:
    """Raises WrongInput if generator and learner would rotate positions by different factors.

    longrope has two sets of factors. If max_model_len exceeds original_max_position_embeddings, vLLM uses the long
    factors for every request of an engine; transformers uses them for long rows only.

    Args:
        tokens: how many tokens the longest prompt with the longest completion has.
    """
    text = text_of(config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in ("longrope", "su"):
        return
    original = text.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if original is not None and tokens > original:
        raise WrongInput(
            f"rollout: max_prompt_length + max_completion_length must be at most {original} for {path}, whose longrope "
            f"takes other factors beyond (original_max_position_embeddings), and not in sampler and learner alike; got "
            f"{tokens}; lower one of them"
        )
