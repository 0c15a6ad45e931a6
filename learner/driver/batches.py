"""The groups of one optimizer batch, out of the Buffer."""

import pyarrow as pa

from cluster.buffer import MAX_REFILLS, Batch, Buffer
from cluster.deadline import within
from cluster.telemetry import Timeline
from learner.algo.advantage import has_signal
from learner.config import RunConfig
from rollout.schema import group_position, rewards_of


class Batches:
    """Waits for: groups, no longer than one may take that waits behind others, and those that replace it."""

    def __init__(self, config: RunConfig, buffer: Buffer, timeline: Timeline) -> None:
        self._config, self._buffer, self._timeline = config, buffer, timeline
        self._size = config.learner.groups_per_step

    async def take(self, step: int) -> Batch:
        """The batch of the step after `step`, in the order of the problem stream (so that a resumed run sums in the
        same order). TimeoutError names what is missing."""
        config, buffer = self._config, self._buffer
        batches = 1 + MAX_REFILLS * config.rollout.dynamic_sampling
        patience = config.cluster.deadlines.start + batches * config.group_deadline_s
        try:
            async with within(patience):
                with self._timeline.span("wait", "loop", step=step + 1):
                    batch = await buffer.take(self._size, step - config.max_staleness, self._useful)
        except TimeoutError:
            raise TimeoutError(
                f"step {step + 1}: waited {patience:g} s for {self._size} groups; {len(buffer)} lie in the buffer, "
                f"{buffer.in_use} of {buffer.slots} slots are in use. Raise cluster.deadlines.group if completions are "
                "long"
            ) from None
        return Batch(sorted(batch.groups, key=group_position), batch.useless)

    def _useful(self, group: pa.Table) -> bool:
        """With dynamic sampling (DAPO, 2503.14476, section 3.2) groups that teach nothing are replaced by others."""
        return not self._config.rollout.dynamic_sampling or has_signal(rewards_of(group))
