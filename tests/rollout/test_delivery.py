"""A delivery is proven: bytes by digest, and use by the logprobs of fixed tokens."""

import numpy as np
import pytest

from rollout.delivery import DeliveryError, Push
from rollout.engine import Adapter

ADAPTER = Adapter.build(17, b"weights", {})
NEW = np.array([-1.0, -2.0, -3.0], np.float32)


def push(previous: list[float] | None, dtype: str = "float32") -> Push:
    return Push(ADAPTER, (1, 2, 3, 4), NEW, None if previous is None else np.array(previous, np.float32), dtype)


def test_what_agrees_passes_with_its_difference() -> None:
    answer = np.array([-1.0, -2.0004, -3.0], np.float32)
    assert push(None).verify("generator-0", ADAPTER.digest, answer) == pytest.approx(4e-4, rel=1e-3)
    assert push([-1.5, -2.0, -3.0]).verify("generator-0", ADAPTER.digest, NEW) == 0.0


def test_a_dropped_push_is_caught_though_it_is_within_the_tolerance() -> None:
    old = [-1.0, -2.0008, -3.0]  # differs by 8e-4: under the 1e-3 that float32 allows
    verdict = r"generator-1: generates with adapter v16, though it acknowledged v17: .* 0% .* 0\.0008 nats"
    with pytest.raises(DeliveryError, match=verdict):
        push(old).verify("generator-1", ADAPTER.digest, np.array(old, np.float32))
    # The same difference with nothing to confuse it with: numerics of another kernel.
    assert push(None).verify("generator-1", ADAPTER.digest, np.array(old, np.float32)) > 0
    # Two policies that are one to the eye: no verdict.
    still = [-1.0, -2.00005, -3.0]
    assert push(still).verify("generator-1", ADAPTER.digest, np.array(still, np.float32)) > 0


@pytest.mark.parametrize("answer", [[-1.0, -2.0, -3.002], [-1.0, float("nan"), -3.0]])
def test_another_policy_is_named_with_worker_version_and_difference(answer: list[float]) -> None:
    difference = "nan" if np.isnan(answer).any() else "0.002"
    verdict = rf"generator-0: adapter v17 is not .* {difference} nats, allowed is 0\.001 \(float32\)"
    with pytest.raises(DeliveryError, match=verdict):
        push(None).verify("generator-0", ADAPTER.digest, np.array(answer, np.float32))
    if difference != "nan":
        assert push(None, "bfloat16").verify("generator-0", ADAPTER.digest, np.array(answer, np.float32)) < 0.003


def test_corrupt_bytes_are_caught_whatever_the_probe_says() -> None:
    digest = Adapter.build(17, b"weights'", {}).digest
    verdict = f"generator-0: adapter v17 .* {digest[:12]}, sent was {ADAPTER.digest[:12]}"
    with pytest.raises(DeliveryError, match=verdict):
        push(None).verify("generator-0", digest, NEW)
