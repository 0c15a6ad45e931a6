"""The guard that stops a run before a broken sampler ruins the policy."""

from collections.abc import Mapping

from learner.config import GuardConfig

METRIC = "policy/mismatch_k3"


class MismatchGuard:
    """Watches the mean k3 of learner and sampler, in nats: an estimate of KL(sampler || learner).

    With max_staleness > 0 the policy's own movement since the tokens were sampled is part of it. The count of steps in
    a row starts at 0 in a resumed run: it has `steps` steps to show that what was changed helped.
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._above: list[float] = []

    def check(self, metrics: Mapping[str, float]) -> str | None:
        """The metrics of one step -> the reason to stop, or None. A step that trained nothing does not count."""
        limit, value = self._config.mismatch_k3, metrics.get(METRIC)
        if limit is None or value is None:
            return None
        self._above = [] if value <= limit else [*self._above, value]  # what is not a number is above
        if len(self._above) < self._config.steps:
            return None
        return (
            f"{METRIC}: must be at most guard.mismatch_k3={limit:g}, was {', '.join(f'{v:.3g}' for v in self._above)} "
            f"in {len(self._above)} steps in a row: the learner trains on tokens that its policy would not have "
            "sampled so. Lower learner.learning_rate or max_staleness, or compare policy/mismatch_max_current: above "
            "1e-3 in float32 the engine disagrees with the learner (model.dtype, sampling settings). The run can be "
            "resumed; guard.mismatch_k3=null switches this off"
        )
