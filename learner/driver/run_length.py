"""How many steps a run has: as its configuration says, or as many as the problems of its epochs make."""

import json
import math
from pathlib import Path

from learner.config import RunConfig
from learner.driver import checkpoint
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
    state = json.loads((resume_from / "state.json").read_text())
    then = RunConfig.model_validate_json((resume_from / "config.json").read_text())
    consumed = Cursor()
    consumed.restore(**state["cursor"])
    step, left = checkpoint.step_of(resume_from), needed - consumed.consumed
    if left <= 0:
        return step
    before = state.get("problems", num_problems)  # of an epoch, by then
    if (then.learner.groups_per_step, before) == (groups, num_problems):
        planned = then.num_steps or math.ceil(then.num_problems(before) / groups)
        recorded = state.get("total_steps", planned)
        if then.num_steps is None and then.epochs == config.epochs:
            return int(recorded)
        if recorded == planned:  # nothing had changed before either
            return math.ceil(needed / groups)
    return step + math.ceil(left / groups)
