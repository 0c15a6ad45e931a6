"""Tiny random models with a byte-level tokenizer, made on the spot: no hub and no download. For trials and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 256 + len(SPECIALS)
EOS_IDS = (258, 256)  # <|im_end|>, <|endoftext|>

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> Any:
    """A tokenizer with one token per byte, four specials after them, and a ChatML template."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    hf: Any = transformers  # its constructors carry no annotations
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIALS))
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_tiny_model(
    path: Path,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int = 1,
    max_length: int = 512,
    tied: bool = True,
    initializer_range: float = 0.1,
    family: str = "Qwen2",
) -> Path:
    """Writes a random model (float32) of a family, Qwen2 or Llama, with its tokenizer under path and returns path.

    vLLM on CPU wants hidden_size / heads in (32, 64, 80, 96, 112, 128, …). The defaults give about 0.1M weights;
    hidden_size=128, layers=4, heads=4 about 1M. initializer_range is large so that next-token
    distributions are far from uniform and an adapter visibly changes them.
    """
    import torch
    import transformers

    hf: Any = transformers  # its constructors carry no annotations
    config = getattr(hf, f"{family}Config")(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        initializer_range=initializer_range,
        eos_token_id=EOS_IDS[0],
        pad_token_id=259,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(hf, f"{family}ForCausalLM")(config)
    model.generation_config = hf.GenerationConfig(eos_token_id=list(EOS_IDS), pad_token_id=259)
    model.float().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def make_adapter(
    path: Path, *, seed: int, rank: int = 8, scale: float = 0.1, targets: Any = "all-linear"
) -> tuple[bytes, dict[str, Any]]:
    """A random, non-zero LoRA adapter for the model under path: (safetensors bytes, adapter_config.json content).

    alpha = 2 * rank; scale is the standard deviation of every A and B entry.
    """
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from safetensors.torch import save
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: torch.randn(weight.shape, generator=generator) * scale
        for name, weight in sorted(get_peft_model_state_dict(model).items())
    }
    content = model.peft_config["default"].to_dict()
    content = {name: sorted(value) if isinstance(value, set) else value for name, value in content.items()}
    content["task_type"] = str(getattr(content["task_type"], "value", content["task_type"]))
    content["peft_type"] = str(getattr(content["peft_type"], "value", content["peft_type"]))
    return save(state), content
