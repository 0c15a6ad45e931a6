"""What the measured idle times of a run say about its settings."""

from dataclasses import dataclass

from learner.config import RunConfig
from rewards.base import JUDGE
from rewards.config import functions_of

WORTH_SAYING = 0.15  # share of the time: idle for less, or a bound on the gain below 1 + that, is not worth a line
REWARDS_SHARE = 0.3  # of the time in which generators have work, from which on the wait for a reward is named


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
    if idle.reward > REWARDS_SHARE * (idle.total - idle.generator):
        return _of_rewards(idle, config)
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


def _of_rewards(idle: IdleTimes, config: RunConfig) -> str:
    judges = [reward for reward in functions_of(config.rewards) if reward.use == JUDGE]
    ways = "rollout.reward_workers (processes that call the functions), a function that waits written as async def"
    if judges:
        ways += ", a judge's args.at_once"
    busy = idle.total - idle.generator
    return (
        f"completions waited for their reward {idle.reward / busy:.0%} as long as generators had work: what shortens "
        f"that helps ({ways})"
    )


def _share_hardware(config: RunConfig) -> bool:
    gpus = config.cluster.gpus
    on_cpu = gpus.generator == gpus.learner == 0
    return on_cpu or (0 < gpus.generator < 1 and 0 < gpus.learner < 1)
