"""Over-sampling: more groups are begun than a batch needs, and those that are generated last are stopped.

`extra` slots are added to those of a batch, so a batch is the first groups that finish. A group that without
over-sampling would have been in that batch, and is still being generated, is stopped. What its worker has of it is kept
and continued later under the newest policy (rollout.partial), so its tokens are of several policies; each is trained on
with the ratio to the policy that sampled it. A group may miss `misses` batches, then the batch waits for it: no token
gets older than max_staleness + misses policy versions, and no group is left out because its completions are long.

All of over-sampling that is not generation stands here. Without it (`extra` 0) nothing is ever stopped.
"""

from collections.abc import Iterable
from math import ceil

from cluster.group_slot import GroupSlot

MISSES = 4  # batches


class Oversampling:
    """Which groups of one Buffer are stopped, and when their slots may be given out again."""

    def __init__(self, extra: int, groups_per_step: int, max_staleness: int) -> None:
        self.extra = extra
        # As many batches as have room for all extra groups, at the least: else not all of them could be in one in time.
        self.misses = max(MISSES, ceil(extra / groups_per_step)) if extra else 0
        self._max_staleness = max_staleness
        self._oldest_on_time = -max_staleness  # a group of an earlier version should be in a batch that is complete

    def may_begin(self, version: int) -> bool:
        """Whether a group that is sampled from this policy version can be in the next batch on time. If not, the slot
        of a stopped group stays free until a newer policy is with every producer."""
        return version >= self._oldest_on_time

    def batch_complete(self, batches: int, generating: Iterable[GroupSlot]) -> None:
        """Stops the groups that should have been in one of the first `batches` batches, which are complete now."""
        self._oldest_on_time = batches - self._max_staleness
        if self.extra:
            for slot in generating:
                if slot.version < self._oldest_on_time:
                    slot.stop()
