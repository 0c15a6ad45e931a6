"""The answer that a generator must give once it has the learner's policy; its own answer is compared with it."""

import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from learner.model.head import check_ids
from learner.model.policy import Policy
from learner.model.served_names import served_weights
from rollout.tensor_digests import digests_of, read_of
from rollout.types import Held
from rollout.weight_sync import Answer


@torch.no_grad()
def answer_of(policy: Policy, version: int, token_ids: list[int], *, merged: bool) -> Answer:
    """What a generator that holds this policy answers to a probe of these tokens.

    Raises ValueError for fewer than two of them, or an id beyond the vocabulary.
    """
    started = time.perf_counter()
    if len(token_ids) < 2:
        raise ValueError(f"token_ids: at least two are needed for a logprob, got {len(token_ids)}")
    check_ids(policy.head, max(token_ids))
    ids = torch.tensor(token_ids, device=policy.head.device)
    states = policy.hidden(ids[None, :-1])
    logprobs = policy.token_logprobs(states, ids[1:], 1.0)
    held = held_of(policy, version, merged=merged)
    return Answer(np.asarray(logprobs.cpu().numpy()), held, time.perf_counter() - started)


@torch.no_grad()
def held_of(policy: Policy, version: int, *, merged: bool) -> Held:
    """Digests of the policy as learner.model.export.update_of sends it. They are made from the weights, one tensor at a
    time, and not from the payload, so that a fault in the payload is found as well."""
    if merged or policy.peft_config is None:
        return Held(digests_of(_merged(policy, version) if merged else _whole(policy, version)))
    return Held(digests_of(_adapter(policy)))


def _adapter(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    scalings = policy.scalings()
    for name, master in policy.masters.items():
        sent = master.detach().to("cpu", policy.dtype, copy=True)
        module, _, matrix = name.removesuffix(".weight").rpartition(".")
        # In the engine's type, and rounded to it, as vLLM does it once on loading.
        if matrix == "lora_B":
            sent.mul_(scalings[module])
        yield from served_weights(policy.model_type, {name: sent}).items()


def _whole(policy: Policy, version: int) -> Iterator[tuple[str, Tensor]]:
    for name in policy.masters:
        yield name, policy.trained.whole(name, lambda weight: read_of(weight, version, policy.dtype))


def _merged(policy: Policy, version: int) -> Iterator[tuple[str, Tensor]]:
    for name, source in policy.merged().items():
        place = torch.empty(source.shape, dtype=policy.dtype, device=policy.head.device)
        source.write(place)
        yield name, read_of(place, version, policy.dtype)
