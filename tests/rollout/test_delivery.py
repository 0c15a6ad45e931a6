"""A delivery is proven: bytes by digest, and use by the logprobs of fixed tokens."""

import asyncio

import numpy as np
import pytest

from rollout.delivery import DeliveryError, Push
from rollout.types import Adapter
from tests.pushes import expect, said

ADAPTER = Adapter.build(17, b"weights", {})
NEW = [-1.0, -2.0, -3.0]


async def verify(worker: str, answer: list[float], previous: list[float] | None, dtype: str = "float32") -> float:
    """The difference that a worker with this answer is told, when the learner says NEW, and said `previous` before."""
    expected = expect(said(NEW), None if previous is None else said(previous))
    return await Push(ADAPTER, (1, 2, 3, 4), expected, dtype).verify(worker, said(answer).logprobs)


async def test_what_agrees_passes_with_its_difference() -> None:
    assert await verify("generator-0", [-1.0, -2.0004, -3.0], None) == pytest.approx(4e-4, rel=1e-3)
    assert await verify("generator-0", NEW, [-1.5, -2.0, -3.0]) == 0.0


async def test_a_dropped_push_is_caught_though_it_is_within_the_tolerance() -> None:
    old = [-1.0, -2.0008, -3.0]  # differs by 8e-4: under the 1e-3 that float32 allows
    verdict = r"generator-1: generates with adapter v16, though it acknowledged v17: .* 0% .* 0\.0008 nats"
    with pytest.raises(DeliveryError, match=verdict):
        await verify("generator-1", old, previous=old)
    # The same difference with nothing to confuse it with: numerics of another kernel.
    assert await verify("generator-1", old, previous=None) > 0
    # Two policies that are one to the eye: no verdict.
    still = [-1.0, -2.00005, -3.0]
    assert await verify("generator-1", still, previous=still) > 0


@pytest.mark.parametrize("answer", [[-1.0, -2.0, -3.002], [-1.0, float("nan"), -3.0]])
async def test_another_policy_is_named_with_worker_version_and_difference(answer: list[float]) -> None:
    difference = "nan" if np.isnan(answer).any() else "0.002"
    verdict = rf"generator-0: adapter v17 is not .* {difference} nats, allowed is 0\.001 \(float32\)"
    with pytest.raises(DeliveryError, match=verdict):
        await verify("generator-0", answer, None)
    if difference != "nan":
        assert await verify("generator-0", answer, None, "bfloat16") < 0.003


async def test_corrupt_bytes_are_caught_before_any_probe() -> None:
    digest = Adapter.build(17, b"weights'", {}).digest
    verdict = f"generator-0: adapter v17 .* {digest[:12]}, sent was {ADAPTER.digest[:12]}"
    push = Push(ADAPTER, (1, 2, 3, 4), asyncio.get_running_loop().create_future(), "float32")
    with pytest.raises(DeliveryError, match=verdict):
        push.check_digest("generator-0", digest)
    push.check_digest("generator-0", ADAPTER.digest)
