"""What a run's settings ask of the memory planner, as values of cluster.memory.plan."""

from collections import Counter

from cluster.memory import learner as learner_memory
from cluster.memory import units
from cluster.memory.plan import Layout, Wish, Workload
from cluster.memory.shape import LINEAR, Shape
from cluster.memory.weight_push import pushed_bytes
from cluster.placement import pack
from learner.config import RunConfig, generator_roles, roles
from learner.model.adapter_config import AdapterError, read_scored
from rewards.config import adapters_of
from rollout.config import DEFAULT_SEQUENCES
from rollout.data.weight_files import WeightsError

MOST_SEQUENCES = 256  # decoded at once; vLLM captures CUDA graphs of up to twice as many tokens, at most 512


def sequence_counts(config: RunConfig) -> list[int]:
    """What rollout.max_num_seqs may be, the preferred first: each sequence costs the logits of its next token."""
    if config.rollout.max_num_seqs != "auto" or config.cluster.gpus.generator == 0:
        return [config.rollout.sequences]
    most = min(max(config.under_way, DEFAULT_SEQUENCES), MOST_SEQUENCES)
    return [most, *(count for count in (128, 64, 32, 16, 8) if count < most)]


def layouts(config: RunConfig) -> tuple[Layout, ...]:
    """The layouts that the run's placement allows, the preferred first; learner.config.rules has refused others."""
    wanted, gpus = config.memory.layout, config.cluster.gpus
    if wanted == "alternating":
        return ("alternating",)
    if gpus.own_cards:
        return ("separate",)
    in_turns = gpus.one_card and config.max_staleness == 0
    return ("slices", "alternating") if wanted == "auto" and in_turns else ("slices",)


def workload(config: RunConfig, sequences: int) -> Workload:
    """sequences: decoded at once by a generator."""
    rollout = config.rollout
    return Workload(
        generations=rollout.num_generations,
        prompt=rollout.max_prompt_length,
        completion=rollout.max_completion_length,
        sequences=sequences,
        adapters=config.max_staleness + 2 if rollout.in_flight == "finish" else 1,
        generators=_generators_a_card(config),
        shards=config.cluster.shards,
        learners=config.cluster.learners if config.cluster.gpus.learner == 0 else 1,  # as of generators
        groups=config.learner.groups_per_step,
    )


def policy_bytes(config: RunConfig, shape: Shape) -> int:
    """Of a policy on its way to the generators."""
    wish = wish_of(config, layouts(config))
    b = units.DTYPE_BYTES[wish.dtype]
    return pushed_bytes(shape, wish.mode, wish.push, wish.targets, b) or b * shape.lora_params(wish.rank, wish.targets)


def stored_bytes(config: RunConfig, policy: int) -> int:
    """What of a policy of that many bytes lies in the object store, where all processes are on one machine."""
    return 0 if config.weights_stay else policy


def _generators_a_card(config: RunConfig) -> int:
    """The most that one card is to hold; on a CPU, where all share one memory, all of them."""
    if config.cluster.gpus.generator == 0:
        return config.rollout.workers
    bundle_of = pack(roles(config)).bundle_of
    return max(Counter(bundle_of[role.name] for role in generator_roles(config)).values())


def wish_of(config: RunConfig, layouts: tuple[Layout, ...]) -> Wish:
    """What the settings fix, and what they leave to the planner."""
    model, learner, sizes, kv = config.model, config.learner, config.memory, config.rollout.kv_cache
    targets, cuda = learner.lora.targets, config.cluster.gpus.learner > 0
    names = LINEAR if targets == "all-linear" else {name.rpartition(".")[2] for name in targets}
    known = tuple(name for name in LINEAR if name in names)
    return Wish(
        mode=learner.mode,
        push=learner.push,
        rank=learner.lora.rank,
        targets=known or tuple(LINEAR),
        dtype=model.dtype,
        optimizer=learner.optimizer.kind,
        frozen_ranks=_frozen_ranks(config),
        value_rank=_value_rank(config),
        reference=model.reference_dtype if learner.mode == "full" and learner.loss.beta > 0 else "none",
        offload=learner.offload_boundaries,
        base=model.base,
        exact=config.settled_learner.reduce == "exact",
        undo=config.cluster.learners > 1 and sizes.base != "sharded",
        shared=sizes.base == "shared",
        base_ranks=config.cluster.learners if sizes.base == "sharded" else 1,
        checkpointing=None if learner.checkpointing == "auto" else learner.checkpointing,
        token_budget=None if learner.token_budget == "auto" else learner.token_budget,
        kv_bytes=None if kv == "auto" else kv,
        kv_dtype=config.kv_dtype,
        layouts=layouts,
        cuda=cuda,
        learner_cap=None if sizes.learner == "auto" else sizes.learner + learner_memory.learner_context(cuda=cuda),
        generator_cap=None if sizes.generator == "auto" else sizes.generator,
    )


def _frozen_ranks(config: RunConfig) -> tuple[int, ...]:
    """Of the reference's adapter, where it is not the bare base, counted as the policy's; and of reward models."""
    model, lora = config.model, config.learner.mode == "lora"
    reference = lora and (model.adapter is not None or model.reference is not None)
    own = config.learner.lora.rank
    return (*([own] if reference else []), *(_rank(one.adapter, own) for one in adapters_of(config.rewards)))


def _value_rank(config: RunConfig) -> int:
    """Of PPO's value."""
    learner = config.learner
    return 0 if learner.algorithm == "grpo" else _rank(learner.value.start, learner.lora.rank)


def _rank(folder: str | None, own: int) -> int:
    """Of the adapter with a scalar head in the folder, if that can be read (learner.driver.preflight says what is wrong
    with it); otherwise the policy's own."""
    try:
        return own if folder is None else read_scored(folder, "")["r"]
    except (AdapterError, WeightsError):
        return own
