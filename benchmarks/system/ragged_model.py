"""A Llama of 25 million random weights whose completions end by chance, so that their lengths are ragged.

Random weights never sample the end token. Here residual channel 0 holds the same constant at every position: the
embeddings write it, and no layer writes to it. The end token's row of the head reads that channel alone, with a gain
found by bisection so that its probability is `end_rate` per token on average. Lengths are then geometric, cut at the
limit, for whichever system samples from the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>")
PAD, END = 0, 1
WORDS = 8000
TEMPLATE = (
    "{% for message in messages %}{{ '<|user|> ' + message['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word w0, w1, ..., after the special ones."""
    names = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=SPECIAL[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[PAD],
        eos_token=SPECIAL[END],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(folder: Path, *, end_rate: float, context: int, seed: int = 0) -> int:
    """Writes model and tokenizer to folder, float32; returns the number of weights."""
    torch.manual_seed(seed)
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": PAD}
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + WORDS,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=6,  # of 64: a width that vLLM's attention has on CPU and GPU
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        initializer_range=0.05,  # with it the next token's entropy is near that of a uniform choice, not equal to it
        **ends,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    _set_end_rate(model, end_rate)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return int(model.num_parameters())


@torch.no_grad()
def _set_end_rate(model: LlamaForCausalLM, end_rate: float) -> None:
    width = float(model.model.embed_tokens.weight.std())
    model.model.embed_tokens.weight[:, 0] = 10 * width
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    head = model.lm_head.weight
    head[:, 0] = 0
    head[: len(SPECIAL)] = 0
    ids = torch.randint(len(SPECIAL), len(head), (8, 512))  # random words are what such a model samples
    hidden = model.model(ids).last_hidden_state[:, 200:].flatten(0, 1)  # [N, H], where completions are: after a prompt
    others = (hidden @ head[len(SPECIAL) :].T).logsumexp(-1)
    low, high = 0.0, 1e4
    for _ in range(60):
        gain = (low + high) / 2
        low, high = (gain, high) if _rate(gain, hidden, others) < end_rate else (low, gain)
    head[END, 0] = gain
    head[[i for i in range(len(SPECIAL)) if i != END], 0] = -gain  # never sampled


def _rate(gain: float, hidden: Tensor, others: Tensor) -> float:
    return float((gain * hidden[:, 0] - others).sigmoid().mean())
