"""The textbook learner that the real one is compared with: one completion at a time, whole logits, plain autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from learner.algo.surrogates import LossConfig


def load(path: str, adapter: str | None) -> Any:
    """Base plus adapter (trainable), or the base alone."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).eval() if adapter else base.eval()


def logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> Tensor:
    """[T] logprobs of the completion."""
    ids = torch.tensor([[*prompt, *completion]])
    logs: Tensor = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    picked = logs[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
    return picked[len(prompt) - 1 :]


def loss(
    lp: Tensor, behavior: Tensor, advantage: float | Tensor, reference: Tensor | None, config: LossConfig
) -> Tensor:
    """[T] loss of each token of one completion, before the denominators; as the papers write it, for autograd."""
    ratio = (lp - behavior).exp()
    held = ratio.detach()
    low, high = config.bounds.get("band") or {"sequence_mask": (0.0, 3.0)}.get(config.ratio, (0.5, 5.0))
    inside = (held >= low) & (held <= high)
    cap = config.bounds.get("cap") or {"cispo": 5.0, "sequence_truncate": 3.0}.get(config.ratio, 2.0)
    weights = {"truncated": held.clamp(max=cap), "cispo": held.clamp(max=cap), "icepop": held * inside}
    weights["masked"] = held.clamp(max=cap) * inside
    new, sign = config.arguments, torch.sign(torch.as_tensor(advantage))
    if config.ratio == "dppo":
        far = (lp.detach().exp() - behavior.exp()) * sign > new["divergence"]
        value = -held.clamp(max=new["cap"]) * advantage * lp * ~far
    elif config.ratio == "sapo":
        tau = torch.where(sign > 0, *new["temperature"])
        value = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantage
    elif config.ratio == "gmpo":  # as its authors write it: the clipped logarithm, signed
        limits = torch.tensor([1 - new["epsilon"][0], 1 + new["epsilon"][1]]).log()
        logs = torch.where(sign > 0, (lp - behavior).clamp(max=limits[1]), (lp - behavior).clamp(min=limits[0]))
        value = -logs.mean().exp().expand(len(lp)) * advantage
    elif config.ratio in weights:
        value = -weights[config.ratio] * advantage * lp
    elif config.ratio.startswith("sequence"):
        value = _trl(lp, behavior, advantage) * _trl_correction(lp, behavior, config.ratio, low, high, cap)
    else:
        below, above = config.bounds.get("epsilon") or {"clip": (0.2, 0.28), "gspo": (3e-4, 4e-4)}[config.ratio]
        if config.ratio == "gspo":
            ratio = (lp - behavior).mean().exp().expand(len(lp))
        bounded = ratio.clamp(
            max=config.bounds.get("delta", 4.0)
        )  # as TRL writes it: for both signs, before the minimum
        value = -torch.min(bounded * advantage, ratio.clamp(1 - below, 1 + above) * advantage)
    if reference is not None:
        d = reference - lp
        value = value + config.beta * (lp - behavior).exp() * (d.exp() - d - 1)
    return value


def _trl(lp: Tensor, behavior: Tensor, advantage: float | Tensor) -> Tensor:
    """[T] TRL's loss of one update per batch (GRPOTrainer._compute_loss): the old policy is the present one."""
    ratio = (lp - lp.detach()).exp()
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def _trl_correction(lp: Tensor, behavior: Tensor, mode: str, low: float, high: float, cap: float) -> Tensor:
    """[1] what TRL multiplies it with (vllm_importance_sampling_mode): the whole completion's ratio to the sampler."""
    whole = (lp.detach() - behavior).sum(-1, keepdim=True).exp()
    if mode == "sequence_truncate":
        return whole.clamp(max=cap)
    return whole.masked_fill((whole < low) | (whole > high), 0.0)
