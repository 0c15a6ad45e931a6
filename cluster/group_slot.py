"""The right to generate one group."""

import asyncio
from dataclasses import dataclass, field


def _not_stopped() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False, slots=True)
class GroupSlot:
    """A slot of the Buffer, in the hands of one producer from `admit` until it calls `put` or `give_up`.

    version: of the newest policy that every producer held at the admission. oldest: that of the group's oldest token,
    which is an earlier one if the group continues what another attempt began. bytes: that the group keeps in memory,
    once it is put. stopped: done as soon as the group is to be stopped (cluster.oversampling).
    """

    version: int
    oldest: int = field(init=False)
    bytes: int = 0
    stopped: asyncio.Future[None] = field(default_factory=_not_stopped)

    def __post_init__(self) -> None:
        self.oldest = self.version

    def stop(self) -> None:
        """Its batch went without this group. Idempotent."""
        if not self.stopped.done():
            self.stopped.set_result(None)
