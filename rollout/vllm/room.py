"""Room on a card for a model that is about to be loaded, once whoever held it before has let go."""

from __future__ import annotations

import time
from collections.abc import Callable

from rollout.types import EngineError

PATIENCE_S, EVERY_S = 60.0, 0.2


def wait_for_room(
    needed: int,
    free: Callable[[], int],
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Returns once so many bytes are free, which free() says. Raises EngineError after a minute."""
    deadline = now() + PATIENCE_S
    while (there := free()) < needed:
        if now() > deadline:
            raise EngineError(
                f"memory: the model and its KV cache need {needed / 2**20:.0f} MiB of the card, and after "
                f"{PATIENCE_S:.0f} s {there / 2**20:.0f} MiB are free: another process holds the rest (nvidia-smi says "
                "which), or memory.device is more than there is"
            )
        sleep(EVERY_S)
