"""The right to generate one group."""

from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class GroupSlot:
    """A slot of the Buffer, in the hands of one producer from `admit` until it calls `put` or `give_up`.

    version: of the newest policy that every producer held at the admission. bytes: that the group keeps in memory, once
    it is put.
    """

    version: int
    bytes: int = 0
