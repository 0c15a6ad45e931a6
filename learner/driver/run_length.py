"""How many steps a run has: as its configuration says, or as many as the problems of its epochs make."""

import json
import math
from pathlib import Path
from typing import Any

from learner.config import RunConfig
from learner.driver import checkpoint
from rollout.data.cursor import Cursor


def total_steps(config: RunConfig, num_problems: int, resume_from: Path | None) -> int:
    """Steps of the run. With epochs: as many as it takes if no group is replaced; none more than the checkpoint has if
    enough problems were consumed by then; where the run was made for batches of another size before
    (resume_allow_changed), as many more as the rest takes."""
    if config.num_steps is not None:
        return config.num_steps
    needed, groups = config.num_problems(num_problems), config.learner.groups_per_step
    if resume_from is None:
        return math.ceil(needed / groups)
    state = json.loads((resume_from / "state.json").read_text())
    then = json.loads((resume_from / "config.json").read_text())
    consumed = Cursor()
    consumed.restore(**state["cursor"])
    step, left = checkpoint.step_of(resume_from), needed - consumed.consumed
    if left <= 0:
        return step
    if then["learner"]["groups_per_step"] == groups:
        if then["epochs"] == config.epochs and "total_steps" in state:
            return int(state["total_steps"])
        if _of_one_size(then, state, num_problems):
            return math.ceil(needed / groups)
    return step + math.ceil(left / groups)


def _of_one_size(then: dict[str, Any], state: dict[str, Any], num_problems: int) -> bool:
    """Whether all steps up to a checkpoint were planned for batches of the size that it has."""
    config = RunConfig.model_validate(then)
    planned = math.ceil(config.num_problems(num_problems) / config.learner.groups_per_step)
    return bool(state.get("total_steps", planned) == planned)
