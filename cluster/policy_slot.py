"""The pipe that carries policies up: one slot that holds the newest value; newest wins, nobody polls."""

import asyncio
from typing import Generic, TypeVar

from cluster.deadline import within

T = TypeVar("T")


class PolicySlot(Generic[T]):
    """One slot with a version, and who has acknowledged which version, for one asyncio event loop."""

    def __init__(self) -> None:
        self.version = -1
        self.acknowledgements: dict[str, int] = {}
        self._away: set[str] = set()
        self._value: T | None = None
        self._newer = asyncio.Condition()  # two, so that an acknowledgement does not wake all who wait for a version
        self._acknowledged = asyncio.Condition()

    def get(self) -> T:
        """The newest value; before the first publish there is none, which is a bug of the caller."""
        assert self._value is not None, "nothing was published yet"
        return self._value

    async def publish(self, version: int, value: T) -> None:
        """Replaces the value; versions only grow."""
        if version <= self.version:
            raise ValueError(f"policy_slot: version must grow, got {version} after {self.version}")
        async with self._newer:
            self.version, self._value = version, value
            self._newer.notify_all()

    async def wait_newer(self, version: int) -> T:
        """The newest value once it is newer than `version`; versions in between are skipped."""
        async with self._newer:
            await self._newer.wait_for(lambda: self.version > version)
            return self.get()

    async def acknowledge(self, name: str, version: int) -> None:
        """`name` holds `version` now."""
        async with self._acknowledged:
            self.acknowledgements[name] = version
            self._acknowledged.notify_all()

    async def leave(self, name: str) -> None:
        """Nobody waits for `name` until it returns, unless all are away."""
        async with self._acknowledged:
            self._away.add(name)
            self._acknowledged.notify_all()

    def back(self, name: str) -> None:
        """`name` is waited for again. It must hold the newest version: older ones may count as acknowledged by all."""
        assert self.acknowledgements[name] == self.version, f"{name} came back without v{self.version}"
        self._away.discard(name)

    def others(self, name: str) -> bool:
        """Whether anybody but `name` has a value and is not away."""
        return bool(self.acknowledgements.keys() - self._away - {name})

    async def acknowledged(self, version: int, names: list[str], deadline_s: float) -> None:
        """Waits until every name that is not away holds `version` or newer, and one at least; TimeoutError says who
        does not and what it holds."""

        def late() -> list[str]:
            present = [name for name in names if name not in self._away] or names
            return [name for name in present if self.acknowledgements.get(name, -1) < version]

        async with self._acknowledged:
            try:
                async with within(deadline_s):
                    await self._acknowledged.wait_for(lambda: not late())
            except TimeoutError:
                held = ", ".join(f"{name} (holds v{self.acknowledgements.get(name, -1)})" for name in late())
                raise TimeoutError(
                    f"policy v{version} not acknowledged after {deadline_s:g} s by {held}; see its log, or raise "
                    "cluster.deadlines.push"
                ) from None
