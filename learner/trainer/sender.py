"""The learner's policies, on their way out of its process."""

import time

from cluster.actor import Shared
from learner.model.export import update_of, write_weights
from learner.model.policy import Policy
from learner.trainer.service import Exported
from rollout.types import SentPolicy, WeightsInFile
from rollout.weights_file import WeightsFile


class Sender:
    """merged: whether an adapter goes out multiplied into the base's weights (learner.push)."""

    def __init__(self, policy: Policy, *, merged: bool) -> None:
        self.merged = merged
        self._policy, self._file = policy, WeightsFile()

    def outgoing(self, version: int, *, stays: bool) -> tuple[Shared[SentPolicy], Exported]:
        """See TrainerService.outgoing."""
        begun = time.perf_counter()
        update: SentPolicy
        if stays and (self.merged or self._policy.peft_config is None):
            update = write_weights(self._policy, version, self._file, merged=self.merged)
        else:
            update = update_of(self._policy, version, merged=self.merged)
        return Shared(update), Exported(update.policy_id, time.perf_counter() - begun)

    def empty(self) -> WeightsInFile:
        """See TrainerService.empty_weights."""
        return self._file.pack(0, {}, self._policy.dtype)
