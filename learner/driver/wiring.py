"""One wiring: buffer, policy slot, producers and loop, between processes of Ray or objects of one process alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.actor import Actor, RevivableActor
from cluster.buffer import Buffer
from cluster.policy_slot import PolicySlot
from learner.config import RunConfig
from learner.driver.batches import Batches
from learner.driver.card_turns import CardTurns
from learner.driver.evaluate import HeldOut, sampled
from learner.driver.fingerprints import Fingerprints
from learner.driver.loop import Loop
from learner.driver.mismatch_guard import MismatchGuard
from learner.driver.reward_models import RewardModels
from learner.driver.run_checkpoints import RunCheckpoints
from learner.driver.schedule import Schedule
from learner.driver.shared_base import replacing_owner
from learner.driver.signal_watch import SignalWatch
from learner.driver.step_metrics import Sinks, StepMetrics
from learner.driver.step_record import StepRecord
from learner.driver.updates import Updates
from learner.driver.weight_sync import WeightSync
from learner.trainer.service import TrainerService
from rollout.data.cursor import Cursor
from rollout.producer import Pipes, ProblemStream, Producer
from rollout.schema import Problem, group_position
from rollout.seeds import group_seed
from rollout.service import RolloutService
from rollout.types import Sampling

BUFFER_BYTES = 512 * 2**20  # groups are kilobytes: this bound is for very long completions


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a run is, apart from its processes.

    alternating: generators and learner take turns on one card. weights_stay: as of
    learner.driver.processes.Processes.
    """

    config: RunConfig
    total_steps: int
    problems: ProblemStream
    heldout: Sequence[Problem]
    fingerprints: Fingerprints
    alternating: bool = False
    weights_stay: bool = False


def wire(
    inputs: Inputs, generators: Sequence[RevivableActor[RolloutService]], trainer: Actor[TrainerService], sinks: Sinks
) -> tuple[Loop, Pipes]:
    """The loop, ready to run, and the pipes that it shares with a producer beside each generator."""
    config, deadlines = inputs.config, inputs.config.cluster.deadlines
    cursor = Cursor()
    buffer = Buffer(
        groups_per_step=config.learner.groups_per_step,
        max_staleness=config.max_staleness,
        max_bytes=BUFFER_BYTES,
        on_drop=lambda group: cursor.again(*group_position(group)),
    )
    pipes = Pipes(inputs.problems, cursor, buffer, PolicySlot(), sinks.timeline)
    queueing = deadlines.model_copy(update={"group": config.group_deadline_s})
    producers = [Producer(generator, pipes, sampling_of(config), queueing) for generator in generators]
    if config.memory.base == "shared":
        for producer in producers:
            producer.worker.replacing = partial(replacing_owner, producer.worker.actor, trainer, deadlines)
    metrics = StepMetrics(sinks, producers, pipes, SignalWatch(config))
    sync = WeightSync(config, trainer, producers, pipes, stays=inputs.weights_stay)
    turns = CardTurns(inputs.alternating, trainer, producers, deadlines.push)
    record = StepRecord(sinks.folder, inputs.total_steps, trainer, deadlines.push)
    reward_models = RewardModels(config.rewards, trainer, deadlines.step, sinks.timeline)
    loop = Loop(
        Schedule(config, inputs.total_steps, cursor, config.num_problems(len(inputs.problems))),
        producers,
        Batches(config, buffer, sinks.timeline),
        Updates(trainer, deadlines.step, pipes, sync, turns, metrics, record, reward_models),
        sync,
        HeldOut(producers, inputs.heldout, config, sinks.timeline),
        RunCheckpoints(config, inputs.total_steps, inputs.fingerprints, trainer, pipes, sinks),
        metrics,
        MismatchGuard(config.guard),
    )
    return loop, pipes


def sampling_of(config: RunConfig) -> Callable[[int, int], Sampling]:
    """(position, attempt) -> how that group is sampled; a pure function, so rollouts are reproducible."""

    def sampling(position: int, attempt: int) -> Sampling:
        return sampled(config, config.rollout.num_generations, group_seed(config.seed, position, attempt))

    return sampling
