"""The textbook learner that the real one is compared with: one completion at a time, whole logits, plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.learner_config import LossConfig


def load(path: str, adapter: str | None) -> Any:
    """Base plus adapter (trainable), or the base alone."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).eval() if adapter else base.eval()


def logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> Tensor:
    """[T] logprobs of the completion."""
    ids = torch.tensor([[*prompt, *completion]])
    logs = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    picked = logs[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
    return picked[len(prompt) - 1 :]


def loss(
    lp: Tensor, behavior: Tensor, advantage: float | Tensor, reference: Tensor | None, config: LossConfig
) -> Tensor:
    """[T] loss of each token of one completion, before the denominators; as the papers write it, for autograd."""
    ratio = (lp - behavior).exp()
    held = ratio.detach()
    inside = (held >= 0.5) & (held <= 5)
    weights = {"truncated": held.clamp(max=2), "cispo": held.clamp(max=5), "icepop": held * inside}
    weights["masked"] = held.clamp(max=2) * inside
    if config.ratio in weights:
        value = -weights[config.ratio] * advantage * lp
    else:
        low, high = config.epsilon or {"clip": (0.2, 0.28), "gspo": (3e-4, 4e-4)}[config.ratio]
        if config.ratio == "gspo":
            ratio = (lp - behavior).mean().exp().expand(len(lp))
        value = -torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if reference is not None:
        d = reference - lp
        value = value + config.beta * (lp - behavior).exp() * (d.exp() - d - 1)
    return value
