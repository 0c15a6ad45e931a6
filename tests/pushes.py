"""Policies on their way, with what a learner says of the probe tokens."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from cluster.actor import Shared
from rollout.delivery import Answer, Push
from rollout.types import Adapter, Held, Weights


def pushed(policy: Adapter | Weights, ids: tuple[int, ...], answer: Answer, dtype: str = "float32") -> Push:
    """On its way, with the learner's answer to the probe tokens."""
    return Push(Shared(policy), policy.policy_id, ids, expect(answer), dtype)


def said(logprobs: npt.ArrayLike) -> Answer:
    return Answer(np.array(logprobs, np.float32), Held({"lora_A": "a", "lora_B": "b"}), 0.0)


def expect(answer: Answer) -> asyncio.Future[Answer]:
    """Already worked out."""
    expected: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    expected.set_result(answer)
    return expected
