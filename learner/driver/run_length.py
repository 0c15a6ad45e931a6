"""How many steps a run has: as its configuration says, or as many as the problems of its epochs make."""

import math
from pathlib import Path

from learner.config import RunConfig
from learner.driver import checkpoint
from learner.driver.resume import config_of
from rollout.data.cursor import Cursor


def total_steps(config: RunConfig, num_problems: int, resume_from: Path | None) -> int:
    """Steps of the run. With epochs: as many as it takes if no group is replaced; none more than the checkpoint has if
    enough problems were consumed by then; where batches or data changed since it began (resume_allow_changed), as many
    more as the rest takes."""
    if config.num_steps is not None:
        return config.num_steps
    needed, groups = config.num_problems(num_problems), config.learner.groups_per_step
    if resume_from is None:
        return math.ceil(needed / groups)
    state, then = checkpoint.read_state(resume_from), config_of(resume_from)
    consumed = Cursor()
    consumed.restore(state.cursor.low, state.cursor.done)
    step, left = checkpoint.step_of(resume_from), needed - consumed.consumed
    if left <= 0:
        return step
    before = num_problems if state.problems is None else state.problems  # of an epoch, by then
    if (then.learner.groups_per_step, before) == (groups, num_problems):
        planned = then.num_steps or math.ceil(then.num_problems(before) / groups)
        recorded = planned if state.total_steps is None else state.total_steps
        if then.num_steps is None and then.epochs == config.epochs:
            return recorded
        if recorded == planned:  # nothing had changed before either
            return math.ceil(needed / groups)
    return step + math.ceil(left / groups)
