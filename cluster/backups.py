"""Which groups take too long, and which producers do: who gets a second producer, and who gets no second group.

A group is late when it has taken `backup_after` times as long as groups usually take (the backup tasks of MapReduce:
Dean and Ghemawat 2004, section 3.6). A producer is slow when the backup of a group that it began was done first. From
then on, until it is the first to finish one, it holds one group at a time, and that counts as late from its beginning:
otherwise it would go on to fill its lanes with groups that others have to wait for before they may help (on slow nodes
and what they cost the others: Zaharia et al. 2008). It is judged by races for the same group, never by the length of
what it generates, and every group is made; so there is no bias to short completions.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice, takewhile
from statistics import median

from cluster.group_slot import Ticket

RECENT = 64  # groups, whose median time is the usual one


class Backups:
    """Of the groups and producers of one Buffer; seconds are those of the loop's clock."""

    def __init__(self, backup_after: float) -> None:
        self._backup_after = backup_after
        self._seconds: deque[float] = deque(maxlen=RECENT)  # from admission to arrival, of the newest groups
        self._slow: set[str] = set()

    def finished(self, ticket: Ticket, producer: str, seconds: float) -> None:
        """`producer` was the first to finish that group."""
        self._seconds.append(seconds)
        if producer == ticket.holders[0]:
            self._slow.discard(producer)
        else:
            self._slow.add(ticket.holders[0])

    def full(self, tickets: Iterable[Ticket]) -> set[str]:
        """The slow producers that are at work on one of `tickets`: they get no other."""
        if not self._slow:
            return set()
        return {name for ticket in tickets if ticket.wanted for name in ticket.holders if name in self._slow}

    def overdue(self, tickets: Collection[Ticket], now: float) -> tuple[list[Ticket], float | None]:
        """Which of `tickets`, the oldest first, a second producer should make as well; and when the next one will be
        such. Nothing is late before it is known what a group usually takes."""
        if not self._seconds or self._backup_after == math.inf:
            return [], None
        patience = self._backup_after * median(self._seconds)
        doubtful = [ticket for ticket in tickets if ticket.holders[0] in self._slow] if self._slow else []
        old = list(takewhile(lambda ticket: ticket.since + patience <= now, tickets))
        then = next((ticket.since + patience for ticket in islice(tickets, len(old), None)), None)
        late = dict.fromkeys([*doubtful, *old])
        return [ticket for ticket in late if ticket.wanted and len(ticket.holders) == 1], then
