"""A generator loads no model before the card has room for it."""

from __future__ import annotations

import pytest

from rollout.types import EngineError
from rollout.vllm.engine import PATIENCE_S, wait_for_room

MIB = 2**20


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def test_it_waits_until_the_bytes_of_the_one_before_are_free() -> None:
    clock = Clock()
    wait_for_room(100 * MIB, lambda: (100 if clock.seconds > 20 else 99) * MIB, clock.now, clock.sleep)
    assert 20 < clock.seconds < 21


def test_it_does_not_wait_for_ever() -> None:
    clock = Clock()
    with pytest.raises(EngineError, match="need 100 MiB of the card, and after 60 s 99 MiB are free"):
        wait_for_room(100 * MIB, lambda: 99 * MIB, clock.now, clock.sleep)
    assert clock.seconds < PATIENCE_S + 1
