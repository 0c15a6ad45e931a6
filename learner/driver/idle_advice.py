"""What the measured idle times of a run say about its settings."""

from dataclasses import dataclass

from learner.config import RunConfig
from rewards.base import JUDGE
from rewards.config import functions_of

WORTH_SAYING = 0.15  # share of the time: idle for less, or a bound on the gain below 1 + that, is not worth a line
REWARDS_SHARE = 0.3  # of the time, from which on the wait for a reward is named


@dataclass(slots=True)
class IdleTimes:
    """Seconds over the steps of a run: in all, and of them those in which a generator (the mean) or the learner had
    nothing to do. reward: from asking for a completion's reward to having it, the mean of each step."""

    total: float = 0.0
    generator: float = 0.0
    learner: float = 0.0
    reward: float = 0.0

    def add(self, metrics: dict[str, float]) -> None:
        """One more step; one with an evaluation or a checkpoint in it says nothing of the two sides."""
        if metrics["time/evaluate"] > 0 or metrics["time/checkpoint"] > 0:
            return
        self.total += metrics["time/step"]
        self.generator += metrics["time/generator_idle"]
        self.learner += metrics["time/learner_idle"]
        self.reward += metrics["reward/ms"] / 1e3


def advice(idle: IdleTimes, config: RunConfig) -> str | None:
    """One sentence for the end of a run, or None where nothing measured speaks for a change.

    Sides that overlap wholly take as long as the longer one, so the bound on the gain in samples per second is
    total / max(generator busy, learner busy). It holds for sides with hardware of their own: on shared cores, or on
    slices of one card, each is slower beside the other.
    """
    if idle.total <= 0:
        return None
    learner_waits = idle.learner >= max(idle.generator, WORTH_SAYING * idle.total)
    if learner_waits and idle.reward > REWARDS_SHARE * idle.total and (ways := _of_rewards(config)):
        share = f"{idle.reward / idle.total:.0%}"
        return f"a completion's reward took {share} of the time of a step; what shortens that helps ({ways})"
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


def _of_rewards(config: RunConfig) -> str:
    """What may shorten the wait for rewards."""
    functions = functions_of(config.rewards)
    ways = []
    if any(reward.use != JUDGE for reward in functions):
        ways.append("rollout.reward_workers; async def for a function that waits for somebody else")
    if any(reward.use == JUDGE for reward in functions):
        ways.append("a judge's args.at_once")
    return "; ".join(ways)


def _share_hardware(config: RunConfig) -> bool:
    gpus = config.cluster.gpus
    on_cpu = gpus.generator == gpus.learner == 0
    return on_cpu or (0 < gpus.generator < 1 and 0 < gpus.learner < 1)
