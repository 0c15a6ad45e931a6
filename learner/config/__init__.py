"""The configuration of a run: its settings, the rules between them, and RunConfig, which holds and checks both."""

from learner.config.run import RunConfig, generator_roles, learner_roles, reward_roles, roles, teacher_roles
from learner.config.settings import GuardConfig, ModelConfig

__all__ = [
    "GuardConfig",
    "ModelConfig",
    "RunConfig",
    "generator_roles",
    "learner_roles",
    "reward_roles",
    "roles",
    "teacher_roles",
]
