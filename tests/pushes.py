"""What a learner says of the probe tokens, as it comes with a push."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from rollout.delivery import Answer, Expected


def said(logprobs: Sequence[float]) -> Answer:
    return Answer(np.array(logprobs, np.float32), 0.0)


def expect(new: Answer, previous: Answer | None = None) -> asyncio.Future[Expected]:
    """Already worked out."""
    expected: asyncio.Future[Expected] = asyncio.get_running_loop().create_future()
    expected.set_result(Expected(new, previous))
    return expected
