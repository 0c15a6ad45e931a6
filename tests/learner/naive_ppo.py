"""The textbook PPO that the real one is compared with: a model of its own for every role, one completion at a time,
whole logits, plain autograd, and sums as the papers write them. What the policy did not sample is computed like all
else, and then left out. Nothing is imported of learner."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification


class Row(NamedTuple):
    """behavior: the sampler's logprobs. sampled: which tokens of the completion are the policy's, the last one is."""

    prompt: list[int]
    completion: list[int]
    behavior: list[float]
    sampled: list[bool]
    reward: float


@dataclass
class Setting:
    temperature: float
    gamma: float
    lam: float
    clip: tuple[float, float]
    value_clip: float
    beta: float


class Models:
    """Four of them, each with all weights of its own: policy; old policy, which samples and is a little another;
    reference; value."""

    def __init__(self, path: str, policy: str, reference: str, value: str) -> None:
        def model(kind: Any, adapter: str, **how: Any) -> Any:
            base = kind.from_pretrained(path, dtype=torch.float32, **how)
            return peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()

        self.policy, self.reference = (model(AutoModelForCausalLM, adapter) for adapter in (policy, reference))
        self.value = model(AutoModelForSequenceClassification, value, num_labels=1)
        self.old = copy.deepcopy(self.policy)
        torch.manual_seed(9)
        with torch.no_grad():
            for weight in trained(self.old).values():
                weight += 0.05 * weight.std() * torch.randn_like(weight)

    def double(self) -> Models:
        """The same in float64."""
        for one in (self.policy, self.reference, self.value, self.old):
            one.double()
        return self

    def values(self, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        """[T] of the state before each token of the completion."""
        inner = self.value.base_model.model
        states = inner.model(input_ids=torch.tensor([[*prompt, *completion]])).last_hidden_state[0]
        scores: Tensor = inner.score(states)[:, 0]
        return scores[len(prompt) - 1 : -1]


def logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> Tensor:
    """[T] of the completion."""
    ids = torch.tensor([[*prompt, *completion]])
    logs: Tensor = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    return logs[:-1].gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]


def advantages_of(values: list[float], reward: float, gamma: float, lam: float) -> list[float]:
    """Backwards, with the reward at the last token."""
    found, after, coming = [], 0.0, 0.0
    for t in reversed(range(len(values))):
        delta = (reward if t == len(values) - 1 else 0.0) + gamma * after - values[t]
        coming = delta + gamma * lam * coming
        after = values[t]
        found.append(coming)
    return found[::-1]


@dataclass
class Found:
    """Of a batch: losses of policy and value, whitened advantages and returns of each sampled token, gradients by
    name."""

    policy_loss: float
    value_loss: float
    advantages: list[float]
    returns: list[float]
    policy_gradient: dict[str, Tensor]
    value_gradient: dict[str, Tensor]


def step(models: Models, rows: Sequence[Row], setting: Setting) -> Found:
    """One update's losses and gradients; the optimizers are the caller's."""
    models.policy.zero_grad()
    models.value.zero_grad()
    with torch.no_grad():
        old_values = [models.values(row.prompt, row.completion)[row.sampled] for row in rows]
        kept_to = [
            logprobs(models.reference, row.prompt, row.completion, setting.temperature)[row.sampled] for row in rows
        ]
    raw = [
        advantages_of(old.tolist(), row.reward, setting.gamma, setting.lam)
        for old, row in zip(old_values, rows, strict=True)
    ]
    flat = torch.tensor([one for own in raw for one in own], dtype=torch.float64)
    white = (flat - flat.mean()) / flat.std(unbiased=False)
    returns = flat + torch.cat(old_values).double()
    count = len(flat)
    policy_loss, value_loss, at = 0.0, 0.0, 0
    for row, old, ref in zip(rows, old_values, kept_to, strict=True):
        own = slice(at, at := at + sum(row.sampled))
        lp = logprobs(models.policy, row.prompt, row.completion, setting.temperature)[row.sampled]
        mu = torch.tensor(row.behavior)[row.sampled].to(lp)
        ratio, a = (lp - mu).exp(), white[own].to(lp)
        gain = torch.min(ratio * a, ratio.clamp(1 - setting.clip[0], 1 + setting.clip[1]) * a)
        kl = (lp - mu).exp() * ((ref - lp).exp() - (ref - lp) - 1)  # whose gradient DeepSeek-V3.2 takes
        loss = (-gain + setting.beta * kl).sum() / count
        torch.autograd.backward(loss)
        policy_loss += float((-gain + setting.beta * kl / (lp - mu).exp()).detach().sum()) / count
        v, target = models.values(row.prompt, row.completion)[row.sampled], returns[own].to(lp)
        near = torch.clamp(v, old - setting.value_clip, old + setting.value_clip)
        loss = 0.5 * torch.max((v - target) ** 2, (near - target) ** 2).sum() / count
        torch.autograd.backward(loss)
        value_loss += float(loss.detach())
    return Found(
        policy_loss, value_loss, white.tolist(), returns.tolist(), gradient(models.policy), gradient(models.value)
    )


def trained(model: Any) -> dict[str, Tensor]:
    """By the names that files have."""
    return {
        name.replace(".default.", ".").replace("modules_to_save.", ""): weight
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


def gradient(model: Any) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in trained(model).items() if weight.grad is not None}
