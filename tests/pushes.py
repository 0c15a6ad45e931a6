"""What a learner says of the probe tokens, as it comes with a push."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt

from rollout.types import Held
from rollout.weight_sync import Answer


def said(logprobs: npt.ArrayLike) -> Answer:
    return Answer(np.array(logprobs, np.float32), Held({"lora_A": "a", "lora_B": "b"}), 0.0)


def expect(answer: Answer) -> asyncio.Future[Answer]:
    """Already worked out."""
    expected: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    expected.set_result(answer)
    return expected
