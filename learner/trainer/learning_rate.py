"""The learning rate of each step. It loads no torch, since a start tells what it will be, too."""

import math

from learner.config.learner import ScheduleConfig


def rate_factor(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """What learning_rate is multiplied by in step `step` (from 0) of `total_steps`; never 0.

    Linear warm-up over the first `warmup` of the run, then 1, or a straight line, or half a cosine (SGDR 1608.03983,
    equation 5), towards 0 after the last step: transformers' schedules, but for its first step, which is of rate 0.
    A function of the step alone, so that a resumed run needs no other state than its step.
    """
    warmup = math.ceil(schedule.warmup * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    rest = max(total_steps - warmup, 1)
    progress = min(step - warmup, rest - 1) / rest
    return 1 - progress if schedule.kind == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
