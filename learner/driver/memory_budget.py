"""The `memory` settings of a run -> the budgets that its processes are held to, and beside them what was measured.

Settled before any process starts; a run that cannot fit is refused with what to change. The plan's choices do not
change what is learned (gradients depend neither on the token budget nor on recomputation), so a run may be resumed
under another plan.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.memory import learner as learner_memory
from cluster.memory import units
from cluster.memory.generator import asleep
from cluster.memory.plan import USABLE, Layout, Misfit, Plan, Wish, Workload, gib
from cluster.memory.search import plan
from cluster.memory.shape import LINEAR, Shape
from cluster.placement import pack
from learner.config import RunConfig, roles
from learner.config.learner import AUTO_TOKEN_BUDGET, LearnerConfig
from rollout.config import DEFAULT_KV

log = logging.getLogger("learner")

NO_LIMIT = 2**60


class MemoryPlanError(ValueError):
    """The run does not fit, or its memory settings contradict each other."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """The settled budgets of a run's processes.

    Attributes:
        learner: the configuration with everything settled that the plan settles.
        kv_cache: bytes of each generator.
        learner_bytes: most that the learner's allocator may hold, without the CUDA context; None: no limit.
        layout: where the roles live.
        plan: what was planned, by role and part; None for an architecture that the memory model does not know.
        note: one line for the user.
    """

    learner: LearnerConfig
    kv_cache: int
    learner_bytes: int | None
    layout: Layout
    plan: Plan | None
    note: str

    @property
    def alternating(self) -> bool:
        """Whether the generators sleep while the learner trains."""
        return self.layout == "alternating"


def settle(config: RunConfig, model: Mapping[str, Any]) -> Budgets:
    """The budgets of a run.

    Args:
        model: the content of the model's config.json.

    Raises:
        MemoryPlanError: the message names the settings to change.
    """
    try:
        shape = Shape.from_config(model, config.model.path)
    except ValueError as error:
        return _unplanned(config, str(error))
    if config.memory.device is None:
        return _unlimited(config, shape)
    found = plan(shape, config.memory.device, _workload(config), _wish(config, _layouts(config)))
    if isinstance(found, Misfit):
        raise MemoryPlanError(str(found))
    _check_cache(config, found)
    chosen = config.learner.model_copy(
        update={"checkpointing": found.checkpointing, "token_budget": found.token_budget}
    )
    note = (
        f"memory: {found.layout} on {gib(found.device_bytes)}: learner {gib(found.learner_bytes)} (checkpointing "
        f"{found.checkpointing}, {found.token_budget} tokens), generator {gib(found.generator_bytes)} (KV cache "
        f"{gib(found.kv_bytes)}, {found.sequences} sequences of full length)"
    )
    return Budgets(chosen, found.kv_bytes, _learner_cap(config, found), found.layout, found, note)


def _unplanned(config: RunConfig, reason: str) -> Budgets:
    sizes = config.memory
    if sizes.device is not None:
        raise MemoryPlanError(f"memory.device: no plan for this model ({reason}); set memory.device=null")
    kv = config.rollout.kv_cache
    cap = None if sizes.learner == "auto" else sizes.learner
    kv_bytes = DEFAULT_KV if kv == "auto" else kv
    return Budgets(config.learner, kv_bytes, cap, _layouts(config)[0], None, f"memory: no plan ({reason})")


def _unlimited(config: RunConfig, shape: Shape) -> Budgets:
    """The settings as they stand; what they will take is planned all the same, to be compared with."""
    learner, kv = config.learner, config.rollout.kv_cache
    cuda = config.cluster.gpus.learner > 0
    settled = {
        "checkpointing": ("full" if cuda else "none") if learner.checkpointing == "auto" else learner.checkpointing,
        "token_budget": AUTO_TOKEN_BUDGET if learner.token_budget == "auto" else learner.token_budget,
    }
    fixed = config.model_copy(
        update={
            "learner": learner.model_copy(update=settled),
            "rollout": config.rollout.model_copy(update={"kv_cache": DEFAULT_KV if kv == "auto" else kv}),
        }
    )
    found = plan(shape, NO_LIMIT, _workload(config), _wish(fixed, _layouts(config)[:1]))
    if isinstance(found, Misfit):
        raise MemoryPlanError(str(found))
    _check_cache(config, found)
    cap = None if config.memory.learner == "auto" else config.memory.learner
    note = (
        f"memory: memory.device is null, so no limit is applied; planned: learner {gib(found.learner_bytes)}, "
        f"generator {gib(found.generator_bytes)}"
    )
    return Budgets(learner, found.kv_bytes, cap, found.layout, found, note)


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


def _layouts(config: RunConfig) -> tuple[Layout, ...]:
    """The layouts that the run's placement allows, the preferred first; learner.config.rules has refused others."""
    wanted, gpus = config.memory.layout, config.cluster.gpus
    if config.memory.base == "shared":
        return ("slices",)
    if wanted == "alternating":
        return ("alternating",)
    if gpus.own_cards:
        return ("separate",)
    in_turns = gpus.one_card and config.max_staleness == 0
    return ("slices", "alternating") if wanted == "auto" and in_turns else ("slices",)


def _workload(config: RunConfig) -> Workload:
    rollout = config.rollout
    return Workload(
        generations=rollout.num_generations,
        prompt=rollout.max_prompt_length,
        completion=rollout.max_completion_length,
        sequences=rollout.max_num_seqs,
        adapters=config.max_staleness + 2 if rollout.in_flight == "finish" else 1,
        generators=_generators_a_card(config),
        groups=config.learner.groups_per_step,
    )


def _generators_a_card(config: RunConfig) -> int:
    """The most that one card is to hold; on a CPU, where all share one memory, all of them."""
    generators = roles(config)[:-1]
    if config.cluster.gpus.generator == 0:
        return len(generators)
    bundle_of = pack(roles(config)).bundle_of
    return max(Counter(bundle_of[role.name] for role in generators).values())


def _wish(config: RunConfig, layouts: tuple[Layout, ...]) -> Wish:
    model, learner, sizes, kv = config.model, config.learner, config.memory, config.rollout.kv_cache
    targets, cuda = learner.lora.targets, config.cluster.gpus.learner > 0
    known = tuple(LINEAR) if targets == "all-linear" else tuple(t for t in LINEAR if t in targets)
    return Wish(
        mode=learner.mode,
        push=learner.push,
        rank=learner.lora.rank,
        targets=known or tuple(LINEAR),
        dtype=model.dtype,
        optimizer=learner.optimizer.kind,
        frozen_adapters=int(learner.mode == "lora" and (model.adapter is not None or model.reference is not None)),
        reference=model.reference_dtype if learner.mode == "full" and learner.loss.beta > 0 else "none",
        offload=learner.offload_boundaries,
        base=model.base,
        shared=sizes.base == "shared",
        checkpointing=None if learner.checkpointing == "auto" else learner.checkpointing,
        token_budget=None if learner.token_budget == "auto" else learner.token_budget,
        kv_bytes=None if kv == "auto" else kv,
        kv_dtype=config.kv_dtype,
        layouts=layouts,
        cuda=cuda,
        learner_cap=None if sizes.learner == "auto" else sizes.learner + learner_memory.learner_context(cuda=cuda),
        generator_cap=None if sizes.generator == "auto" else sizes.generator,
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
    return round(USABLE * found.device_bytes) - others - found.learner["context"]
