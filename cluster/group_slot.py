"""Who generates a group, and for how long that is worth while."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Ticket:
    """A slot of the Buffer: the right to generate one group.

    version: of the policy at its admission. oldest: that of the group's oldest token, which is an earlier one if the
    group goes on from what a straggler left. since: seconds of the loop's clock. holders: who is at work on it, in
    their order. work: the (position, attempt) to generate, as the first holder writes it here for the second.
    """

    version: int
    since: float
    holders: list[str]
    work: tuple[int, int] | None = None
    wanted: bool = True  # no other holder has put the group, and it is no straggler
    late: bool = False  # a straggler: its batch went without it, and what there is of it goes on later
    bytes: int = 0  # that the group keeps in memory, once it is put
    oldest: int = field(init=False)
    _scopes: list[asyncio.Timeout] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.oldest = self.version

    @asynccontextmanager
    async def while_wanted(self) -> AsyncIterator[None]:
        """Stops its body, and goes on behind it, as soon as the group is not wanted any more."""
        scope = asyncio.timeout(None if self.wanted else 0)
        self._scopes.append(scope)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():  # the body's own
                raise
        finally:
            self._scopes.remove(scope)

    def stop(self, late: bool) -> None:
        """The group is not wanted any more."""
        if self.wanted:
            self.wanted, self.late = False, late
            for scope in self._scopes:
                scope.reschedule(0)
