"""What a push of whole weights takes (learner.push: merged; learner.mode: full), in bytes. Pure functions.

What travels is host memory: on CUDA no plan of a card counts it, on a CPU it is of the memory that both roles have. An
adapter's own bytes are not counted.
"""

from cluster.memory.shape import LINEAR, Shape

BLOCKS = (
    tuple(LINEAR)[:4],
    tuple(LINEAR)[4:],
)  # attention, feed-forward: a block is sent whole (learner.model.policy)
# On a CPU, as multiples of what is sent, by the growth of the resident sets (benchmarks.engine.whole_push). Learner:
# the file that generators read, with room for two policies, of which it maps one (1.0); through the object store its
# own bytes and the store's pages of this push and of the one before, which is still held (3.4 with 75 MB). Generator
# (1.4 and 1.9): its view, and vLLM's copies of the layer that it is loading.
FILE_COPIES, STORE_COPIES, GENERATOR_COPIES = 2, 3, 2
# Of a generator of several processes: the view of the one that asks them, which hashes the weights (estimate). Where
# they come through the object store it is a copy, in which the others find them (rollout.vllm.policies).
SHARDS_COPIES = 1


def pushed_bytes(shape: Shape, mode: str, push: str, targets: tuple[str, ...], b: int) -> int:
    """The whole model; or the linear weights of the blocks that the adapter touches; 0 for an adapter. b: bytes of an
    element."""
    if mode == "full":
        return b * shape.params
    if push == "adapter":
        return 0
    sent = [name for block in BLOCKS if set(block) & set(targets) for name in block]
    return b * shape.layers * sum(i * o for i, o in map(shape.linear, sent))


def learner_copies(*, undo: bool) -> int:
    """Of several ranks that are replaced one by one, what one has sent must outlive it: it goes to the object store."""
    return STORE_COPIES if undo else FILE_COPIES


def merging_bytes(shape: Shape) -> int:
    """One matrix at a time is float32 where it lies, before it is rounded and travels."""
    return 4 * max(i * o for i, o in map(shape.linear, LINEAR))
