"""What the measured idle times of a run say about its settings."""

from dataclasses import dataclass

from learner.config import RunConfig

WORTH_SAYING = 0.15  # share of the time: idle for less, or a bound on the gain below 1 + that, is not worth a line


@dataclass(slots=True)
class IdleTimes:
    """Seconds over the steps of a run: in all, and of them those in which a generator (the mean) or the learner had
    nothing to do."""

    total: float = 0.0
    generator: float = 0.0
    learner: float = 0.0

    def add(self, metrics: dict[str, float]) -> None:
        """One more step; one with an evaluation or a checkpoint in it says nothing of the two sides."""
        if metrics["time/evaluate"] > 0 or metrics["time/checkpoint"] > 0:
            return
        self.total += metrics["time/step"]
        self.generator += metrics["time/generator_idle"]
        self.learner += metrics["time/learner_idle"]


def advice(idle: IdleTimes, config: RunConfig) -> str | None:
    """One sentence for the end of a run, or None where nothing measured speaks for a change.

    Sides that overlap wholly take as long as the longer one, so the bound on the gain in samples per second is
    total / max(generator busy, learner busy). It holds for sides with hardware of their own: on shared cores, or on
    slices of one card, each is slower beside the other.
    """
    if idle.total <= 0:
        return None
    share, other = (f"{idle_s / idle.total:.0%}" for idle_s in (idle.generator, idle.learner))
    shares = f"generators were idle {share} of the time, the learner {other}"
    if config.max_staleness > 0:
        if max(idle.generator, idle.learner) < WORTH_SAYING * idle.total:
            return None
        if idle.generator < idle.learner:
            return (
                f"{shares}: generation is the longer side; what shortens it helps (rollout.workers, its cores or card)"
            )
        return f"{shares}: training is the longer side; what shortens it helps (the learner's cores or card)"
    gain = idle.total / max(idle.total - idle.generator, idle.total - idle.learner)
    if gain < 1 + WORTH_SAYING:
        return None
    bound = f"max_staleness=1 lets them work at once: at most {gain:.1f} times the samples per second"
    if _share_hardware(config):
        return (
            f"{shares}, since they take turns. {bound} if each had hardware of its own; here they share it, so try it"
        )
    return f"{shares}, since they take turns. {bound}"


def _share_hardware(config: RunConfig) -> bool:
    gpus = config.cluster.gpus
    on_cpu = gpus.generator == gpus.learner == 0
    return on_cpu or (0 < gpus.generator < 1 and 0 < gpus.learner < 1)
