"""RunConfig: settings that go together, and the processes that they ask for."""

from pydantic import ValidationInfo, model_validator

from cluster.placement import Role
from learner.config.rules import broken_rules
from learner.config.settings import Settings
from rewards.config import TAKEN, resolved_names


class RunConfig(Settings):
    """The settings of one run, checked against each other."""

    @model_validator(mode="after")
    def _reward_names(self, info: ValidationInfo) -> "RunConfig":
        if _each_alone(info):
            return self
        taken = TAKEN & set(resolved_names(self.rewards))
        if taken:
            raise ValueError(f"rewards: a metric is named so already; set rewards.<i>.name (got {', '.join(taken)})")
        return self

    @model_validator(mode="after")
    def _settings_go_together(self, info: ValidationInfo) -> "RunConfig":
        if _each_alone(info):
            return self
        if broken := broken_rules(self):
            raise ValueError("\n".join(broken))
        return self


def _each_alone(info: ValidationInfo) -> bool:
    """Whether rules between settings are passed over, since some settings were left out (learner.config.load)."""
    return isinstance(info.context, dict) and info.context.get("rules") is False


def roles(config: Settings) -> list[Role]:
    """The processes of a run: its generators, those that only score, then the learner or its ranks."""
    return [*generator_roles(config), *reward_roles(config), *learner_roles(config)]


def generator_roles(config: Settings) -> list[Role]:
    """Those that sample."""
    cpus, gpus = config.cluster.cpus.generator, config.cluster.gpus.generator
    return [Role(f"generator-{rank}", cpus, gpus) for rank in range(config.rollout.workers)]


def reward_roles(config: Settings) -> list[Role]:
    """Those that do nothing but score; none where that is done beside the generators."""
    asked = config.cluster.rewards
    return [Role(f"rewards-{i}", asked.cpus, asked.gpus, node=asked.node) for i in range(asked.processes)]


def learner_roles(config: Settings) -> list[Role]:
    """Those that learn; near each other, since ranks exchange gradients in every step."""
    cpus, gpus, count = config.cluster.cpus.learner, config.cluster.gpus.learner, config.cluster.learners
    return [Role("learner" if count == 1 else f"learner-{rank}", cpus, gpus, packed=True) for rank in range(count)]
