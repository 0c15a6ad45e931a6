"""What a run on cards takes of the machine's main memory, in bytes, by part. On a CPU the plan itself is of it."""

from cluster.memory.between_steps import undo_bytes, value_params
from cluster.memory.generator import ENGINE_PROCESS, engine_processes
from cluster.memory.learner import LEARNER_PROCESS
from cluster.memory.plan import Plan, Wish
from cluster.memory.shape import Shape
from cluster.memory.sharded import FILE_BYTES, divided_params
from cluster.memory.units import DTYPE_BYTES, Parts
from cluster.memory.weight_push import FILE_COPIES, SHARDS_COPIES, STORE_COPIES, pushed_bytes

# Resident sets in the middle of a run on two cores (configs/local_cpu.yaml, Linux, Ray 2.60), shared pages included:
# the driver; Ray's own processes together; one reward process.
DRIVER, RAY, REWARD = 330 * 10**6, 360 * 10**6, 150 * 10**6
ENVIRONMENT_SERVER, ENVIRONMENT = 290 * 10**6, 11 * 10**6  # what they are forked from; what each then writes itself
CUDA_LIBRARIES = 1500 * 10**6  # of each process on a card, beside torch: cuBLAS, kernels, pinned buffers (estimate)


def host_bytes(
    found: Plan,
    wish: Wish,
    *,
    object_store: int,
    learners: int = 1,
    reward_processes: int = 1,
    reward_models: int = 0,
    environments: int = 0,
) -> Parts:
    """Main memory of one machine that runs the plan.

    driver, ray, rewards (`reward_processes` in all; a function of the user's that loads a model takes
      its own on top, up to rollout.reward_memory): measured. learner, generators: their processes without a model,
      measured on a CPU, and CUDA's libraries (estimate).
    reward_models: bytes of the weights that each reward process loads for `use: sequence_classifier`; with any, it
      holds torch as well, as the learner's process does.
    environments: as many at once beside each generator, measured with tools in Python; what they load themselves comes
      on top, up to env.memory.
    object_store: what it may take; Ray keeps it in /dev/shm.
    asleep: weights and adapters of generators that sleep (vLLM's sleep level 1), pinned.
    learners: ranks of the learner, each with its own of what follows.
    offloaded: learner.offload_boundaries. undo: of several ranks, what each step began with. paged: the states of
      paged_adamw_8bit, once the card is full. policy: whole weights, where the generators read them (of those that come
      through the object store, where the processes of a generator of several do).
    passing: the most of what comes and goes: the learner's weights as they are loaded (4 bits and shards matrix by
      matrix), copies of a push of whole weights, or what a checkpoint of a whole model is writing. vLLM
      reads mapped files: those pages are cache, and given back when memory is wanted.
    """
    shape, b, n = found.shape, DTYPE_BYTES[wish.dtype], found.shape.params
    pushed = pushed_bytes(shape, wish.mode, wish.push, wish.targets, b)
    stored = found.generators * SHARDS_COPIES if found.shards > 1 else 0
    saving = _saving(found, wish, learners) if wish.mode == "full" else 0
    asleep = found.generator["weights"] + found.generator["lora_slots"] if found.layout == "alternating" else 0
    each = reward_models + LEARNER_PROCESS if reward_models else REWARD
    return {
        "driver": DRIVER,
        "ray": RAY,
        "object_store": object_store,
        "rewards": reward_processes * each,
        "environments": found.generators * (ENVIRONMENT_SERVER + environments * ENVIRONMENT) if environments else 0,
        "learner": learners * (LEARNER_PROCESS + CUDA_LIBRARIES),
        "generators": found.generators * engine_processes(found.shards) * (ENGINE_PROCESS + CUDA_LIBRARIES),
        "asleep": found.generators * asleep,
        "offloaded": learners * shape.layers * b * shape.hidden * found.token_budget if wish.offload else 0,
        "undo": learners * _undo(shape, wish) if wish.undo else 0,
        "policy": (stored if wish.undo else FILE_COPIES) * pushed,
        "paged": learners * 2 * n if wish.optimizer == "paged_adamw_8bit" else 0,
        "passing": max(learners * _loading(found, wish), STORE_COPIES * pushed if wish.undo else 0, saving),
    }


def _loading(found: Plan, wish: Wish) -> int:
    """Of one learner's weights, as they are loaded; those of a generator are mapped."""
    shape, b = found.shape, DTYPE_BYTES[wish.dtype]
    if wish.shared:
        return 0
    return b * shape.params if found.base == "none" and wish.base_ranks == 1 else b * shape.vocab * shape.hidden


def _saving(found: Plan, wish: Wish, learners: int) -> int:
    """Of a whole model its largest matrix, in float32; in shards what one file holds, and its bytes as they are
    written."""
    if wish.base_ranks > 1:
        return learners * 2 * min(FILE_BYTES, 12 * divided_params(found.shape, wish.base_ranks))
    return 4 * found.shape.vocab * found.shape.hidden


def _undo(shape: Shape, wish: Wish) -> int:
    """Of one rank: of its adapter, and of PPO's value."""
    value = sum(value_params(shape, wish.value_rank, wish.targets))
    return undo_bytes(shape.lora_params(wish.rank, wish.targets) + value, wish.optimizer)
