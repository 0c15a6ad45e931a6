"""What stands in for a role in its real process, which can import it from here."""

import asyncio
from typing import Any


class Sleeper:
    """Starts, whatever it is given."""

    def __init__(self, *args: Any) -> None:
        pass

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        pass


def refuse(*args: Any) -> None:
    """A learner that cannot train the model it is given."""
    raise ValueError("model.path: config sets logits_scaling=8.0,\n  which the learner does not know")
