"""What a run is asked to do: settings, the rules between them, and all of it as one RunConfig."""

from learner.config.run import RunConfig, generator_roles, learner_roles, reward_roles, roles
from learner.config.settings import GuardConfig, ModelConfig

__all__ = ["GuardConfig", "ModelConfig", "RunConfig", "generator_roles", "learner_roles", "reward_roles", "roles"]
