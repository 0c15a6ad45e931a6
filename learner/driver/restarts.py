"""learner.restarts: how often a lost learner is replaced, and from where the run then goes on."""

from collections.abc import Callable
from dataclasses import replace

from cluster.actor import ValueLost
from learner.driver import checkpoint
from learner.driver.failure import first_of, sentence_of
from learner.driver.preflight import Prepared
from learner.driver.watched_learner import LearnerLost


class Restarts:
    """Holds what the next attempt starts from.

    An attempt begins with fresh processes for all roles, as the same command would: policy versions fall back with the
    learner, and an engine that has served a later one takes no earlier one.
    """

    def __init__(self, prepared: Prepared, note: Callable[[str], None]) -> None:
        self.prepared, self._note = prepared, note
        self._allowed, self._used = prepared.config.learner.restarts, 0

    def after(self, error: BaseException, *, begun: bool) -> bool:
        """True if the run goes on after this error. begun: the attempt came as far as its loop, so that the newest
        checkpoint on the disk is one that it would go on from. What is lost with its node on the way to a generator is
        a policy, and the learner with it."""
        lost = first_of(error)
        if not isinstance(lost, LearnerLost | ValueLost) or self._used == self._allowed:
            return False
        self._used += 1
        newest = checkpoint.newest(self.prepared.config.run_dir / "checkpoints")[0] if begun else None
        if newest is not None:
            self.prepared = replace(self.prepared, resume_from=newest, finished_steps=checkpoint.step_of(newest))
        where = f"step {self.prepared.finished_steps}" if self.prepared.resume_from else "the start"
        self._note(f"{sentence_of(lost)}; restart {self._used} of {self._allowed}, with fresh processes, from {where}")
        return True
