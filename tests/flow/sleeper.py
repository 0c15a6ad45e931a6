"""What an actor's process can import."""

import asyncio


class Sleeper:
    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
