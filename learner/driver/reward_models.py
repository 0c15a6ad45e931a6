"""Reward models on the policy's base (`rewards` with `use: adapter:<folder>`): checked before the start, and asked
before each update. The learner holds them, since it holds the base.

What they say goes into the rows as if a worker had scored them, before these go to disk and before the learner sees
them: all that is made of rewards knows nothing of reward models.
"""

import time
from collections.abc import Sequence

import pyarrow as pa

from cluster.actor import Actor
from cluster.telemetry import Timeline
from learner.config import RunConfig
from learner.driver.fingerprints import base_name, same_base
from learner.model.adapter_config import AdapterError, read_scored
from learner.trainer.service import TrainerService
from rewards.config import RewardConfig, adapters_of
from rollout.data.model_files import CONFIG, read_json
from rollout.data.weight_names import check_adapter, sizes_of
from rollout.scored import with_part


class RewardModels:
    """Waits for: the learner. Does nothing without reward models."""

    def __init__(
        self, rewards: Sequence[RewardConfig], trainer: Actor[TrainerService], deadline_s: float, timeline: Timeline
    ) -> None:
        self._models, self._trainer = adapters_of(rewards), trainer
        self._deadline_s, self._timeline = deadline_s, timeline

    async def score(self, groups: Sequence[pa.Table], step: int) -> tuple[list[pa.Table], dict[str, float]]:
        """The groups with a part of the reward from each model; and time/score, seconds, if there are any."""
        if not self._models or not groups:
            return list(groups), {}
        started = time.perf_counter()
        with self._timeline.span("train", "learner", step=step):  # the same card is busy, with the same rows
            said = await self._trainer.call(TrainerService.score, self._deadline_s, list(groups))
        scored, begin = [], 0
        for group in groups:
            for model, scores in zip(self._models, said, strict=True):
                group = with_part(group, str(model.name), model.weight, scores[begin : begin + len(group)])
            scored.append(group)
            begin += len(group)
        return scored, {"time/score": time.perf_counter() - started}


def check_scored_adapters(config: RunConfig) -> None:
    """Reward models, and the one that a value starts from. Raises AdapterError or WeightsError: one is not of the base,
    has no scalar head, or is damaged."""
    named = [(f"rewards: {model.name}", str(model.adapter)) for model in adapters_of(config.rewards)]
    if config.learner.value.start is not None:
        named.append(("learner.value.start", config.learner.value.start))
    sizes = sizes_of(read_json(config.model.source, CONFIG)) if named else None
    for key, folder in named:
        content = read_scored(folder, key)
        base = content.get("base_model_name_or_path")
        if base and not same_base(str(base), config.model.path):
            raise AdapterError(
                f"{key}: base_model_name_or_path of {folder} must be model.path, {config.model.path}, got "
                f"{base_name(str(base))}: on another base its scores mean nothing; train it on this one, or write "
                "model.path there if it is the same"
            )
        check_adapter(folder, key, content, sizes)
