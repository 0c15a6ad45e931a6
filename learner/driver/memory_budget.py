"""The `memory` settings of a run -> the budgets that its processes are held to, and beside them what was measured.

Settled before any process starts; a run that cannot fit is refused with what to change. The plan's choices do not
change what is learned (gradients depend neither on the token budget nor on recomputation), so a run may be resumed
under another plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.machine import main_memory
from cluster.memory import units
from cluster.memory.generator import asleep
from cluster.memory.plan import USABLE, Layout, Misfit, Plan, gib
from cluster.memory.search import plan
from cluster.memory.shape import Shape
from cluster.ray_cluster import joins
from learner.config import RunConfig
from learner.config.learner import AUTO_TOKEN_BUDGET, LearnerConfig
from learner.driver.plan_request import layouts, policy_bytes, sequence_counts, wish_of, workload
from rollout.config import DEFAULT_KV

NO_LIMIT = 2**60
PUSH_RATE = 50e6  # bytes a second of a policy that is pushed, at the least: copied, hashed twice, loaded layer by layer


class MemoryPlanError(ValueError):
    """The run does not fit, or its memory settings contradict each other."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """The settled budgets of a run's processes.

    Attributes:
        learner: the configuration with everything settled that the plan settles.
        kv_cache: bytes of each generator.
        sequences: most that a generator decodes at once.
        learner_bytes: most that the learner's allocator may hold, without the CUDA context; None: no limit.
        policy_bytes: of a policy on its way to the generators, as far as that is known before there is one.
        layout: where the roles live.
        plan: what was planned, by role and part; None for an architecture that the memory model does not know.
        note: one line for the user.
    """

    learner: LearnerConfig
    kv_cache: int
    sequences: int
    learner_bytes: int | None
    policy_bytes: int
    layout: Layout
    plan: Plan | None
    note: str

    @property
    def alternating(self) -> bool:
        """Whether the generators sleep while the learner trains."""
        return self.layout == "alternating"


def settle(config: RunConfig, model: Mapping[str, Any], card: int | None = None) -> Budgets:
    """The budgets of a run.

    Args:
        model: the content of the model's config.json.
        card: bytes of the card that both roles are on; taken where memory.device is null.

    Raises:
        MemoryPlanError: the message names the settings to change.
    """
    try:
        shape = Shape.from_config(model, config.model.path)
    except ValueError as error:
        return _unplanned(config, str(error))
    device = config.memory.device or card
    if device is None:
        return _unlimited(config, shape)
    best = planned(config, shape, device)
    if isinstance(best, Misfit):
        raise MemoryPlanError(str(best))
    found, sequences = best
    _check_cache(config, found)
    chosen = config.learner.model_copy(
        update={"checkpointing": found.checkpointing, "token_budget": found.token_budget}
    )
    note = (
        f"memory: {found.layout} on {gib(found.device_bytes)}: {_learner(config, found)} (checkpointing "
        f"{found.checkpointing}, {found.token_budget} tokens), generator {gib(found.generator_bytes)} (KV cache "
        f"{gib(found.kv_bytes)}, {found.sequences} sequences of full length)"
    )
    note += _waiting(found.sequences, min(sequences, config.under_way))
    cap, sent = _learner_cap(config, found), policy_bytes(config, shape)
    return Budgets(chosen, found.kv_bytes, sequences, cap, sent, found.layout, found, note)


def planned(config: RunConfig, shape: Shape, device: int) -> tuple[Plan, int] | Misfit:
    """What fits, and the sequences that a generator decodes at once: of those that may be, the number of which most
    find room in the KV cache, and fewer if their logits leave the learner what spares it work.
    """
    wish = wish_of(config, layouts(config))
    best: tuple[Plan, int] | None = None
    for count in sequence_counts(config):
        if best is not None and count <= best[0].sequences:  # no fewer sequences find more room
            break
        found = plan(shape, device, workload(config, count), wish)
        if isinstance(found, Plan) and (best is None or _rank(found) > _rank(best[0])):
            best = found, count
    if best is None:
        assert isinstance(found, Misfit)
        return found
    return best


def _rank(found: Plan) -> tuple[int, int, int]:
    """Sequences that find room; then activations that are kept, and not computed twice; then tokens at once."""
    return found.sequences, found.learner["activations"], found.token_budget


def _learner(config: RunConfig, found: Plan) -> str:
    ranks = config.cluster.learners
    return f"{'learner' if ranks == 1 else f'each of {ranks} learner ranks'} {gib(found.learner_bytes)}"


def _beyond(config: RunConfig, found: Plan) -> str:
    """All roles of a CPU, where they are of one machine, against its memory."""
    cluster = config.cluster
    if cluster.gpus.generator > 0 or cluster.gpus.learner > 0 or joins(cluster.address):
        return ""
    planned, there = cluster.learners * found.learner_bytes + found.generators * found.generator_bytes, main_memory()
    return "" if planned <= there else f"; together {gib(planned)}, and this machine has {gib(there)}"


def _waiting(cached: int, asked: int) -> str:
    """A generator that holds fewer sequences than could be decoded at once is slower than it might be."""
    if cached >= asked:
        return ""
    return f"; {asked} are generated at once: those that find no room wait, unless they end early"


def _unplanned(config: RunConfig, reason: str) -> Budgets:
    sizes = config.memory
    if sizes.device is not None:
        raise MemoryPlanError(f"memory.device: no plan for this model ({reason}); set memory.device=null")
    kv = config.rollout.kv_cache
    cap = None if sizes.learner == "auto" else sizes.learner
    kv_bytes = DEFAULT_KV if kv == "auto" else kv
    note = f"memory: no plan ({reason})"
    if kv == "auto" and config.cluster.gpus.generator > 0:
        note += f"; the KV cache has {gib(DEFAULT_KV)}, which is little on a card: set rollout.kv_cache"
    return Budgets(config.learner, kv_bytes, config.rollout.sequences, cap, 0, layouts(config)[0], None, note)


def _unlimited(config: RunConfig, shape: Shape) -> Budgets:
    """Without a card that both roles are on: the settings as they stand; what they will take is planned all the same,
    to be compared with."""
    learner, kv = config.learner, config.rollout.kv_cache
    cuda = config.cluster.gpus.learner > 0
    chosen = {
        "checkpointing": ("full" if cuda else "none") if learner.checkpointing == "auto" else learner.checkpointing,
        "token_budget": AUTO_TOKEN_BUDGET if learner.token_budget == "auto" else learner.token_budget,
    }
    fixed = config.model_copy(
        update={
            "learner": learner.model_copy(update=chosen),
            "rollout": config.rollout.model_copy(update={"kv_cache": DEFAULT_KV if kv == "auto" else kv}),
        }
    )
    sequences = config.rollout.sequences
    found = plan(shape, NO_LIMIT, workload(config, sequences), wish_of(fixed, layouts(config)[:1]))
    if isinstance(found, Misfit):
        raise MemoryPlanError(str(found))
    _check_cache(config, found)
    cap = None if config.memory.learner == "auto" else config.memory.learner
    note = (
        f"memory: memory.device is null, so no limit is applied; planned: {_learner(config, found)}, "
        f"generator {gib(found.generator_bytes)}{_beyond(config, found)}"
    )
    return Budgets(learner, found.kv_bytes, sequences, cap, policy_bytes(config, shape), found.layout, found, note)


def _check_cache(config: RunConfig, found: Plan) -> None:
    if found.sequences < 1:
        tokens = config.rollout.max_prompt_length + config.rollout.max_completion_length
        raise MemoryPlanError(
            f"rollout.kv_cache: must hold one sequence of {tokens} tokens, {gib(found.kv_bytes)} does not; raise it, "
            "set it to auto with memory.device, or lower rollout.max_prompt_length or max_completion_length"
        )
    heads = found.shape.head_dim
    if config.rollout.kv_cache_dtype == "fp8" and config.cluster.gpus.generator == 0 and heads % 32:
        raise MemoryPlanError(
            f"rollout.kv_cache_dtype: fp8 on a CPU needs heads of a multiple of 32 elements (vLLM), got {heads}; "
            "set it to auto"
        )


def _learner_cap(config: RunConfig, found: Plan) -> int:
    """memory.learner, or else all that the generators leave, since only the learner's need grows with the batch."""
    if config.memory.learner != "auto":
        return config.memory.learner
    others = 0
    if found.layout == "slices":
        others = found.generators * found.generator_bytes
    elif found.layout == "alternating":
        others = found.generators * units.total(asleep(found.generator))
    return (round(USABLE * found.device_bytes) - others) // found.learners - found.learner["context"]


def settled(config: RunConfig, budgets: Budgets) -> RunConfig:
    """The configuration with the plan's rollout.max_num_seqs, by which generators and evaluation go, and with the
    seconds that the bytes of a policy take on their way."""
    deadlines = config.cluster.deadlines
    patient = deadlines.model_copy(update={"push": deadlines.push + budgets.policy_bytes / PUSH_RATE})
    updates = {
        "rollout": config.rollout.model_copy(update={"max_num_seqs": budgets.sequences}),
        "cluster": config.cluster.model_copy(update={"deadlines": patient}),
    }
    return config.model_copy(update=updates)
