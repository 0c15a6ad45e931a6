"""What a learner says of the probe tokens, as it comes with a push."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from rollout.types import Held
from rollout.weight_sync import Answer


def said(logprobs: Sequence[float]) -> Answer:
    return Answer(np.array(logprobs, np.float32), Held({"lora_A": "a", "lora_B": "b"}), 0.0)


def expect(answer: Answer) -> asyncio.Future[Answer]:
    """Already worked out."""
    expected: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    expected.set_result(answer)
    return expected
