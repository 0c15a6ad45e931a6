"""The memory model of a learner's base that is divided among its ranks (memory.base: sharded). Pure functions."""

from cluster.memory.shape import Shape
from cluster.memory.units import Parts

LAYERS = 3  # that are whole at once: the one at work, the next, gathered meanwhile, and the buffer that it arrives in


def sharded_base_bytes(shape: Shape, b: int, ranks: int) -> Parts:
    """Of one rank; b: bytes per element.

    weights: its rows of all matrices, and a tied embedding, which stays whole. gathered: the most that is whole for a
    while, of layers, or an embedding and the buffer that it arrives in.
    """
    embedding = b * shape.vocab * shape.hidden
    whole = embedding if shape.tied else 0
    layer = (b * shape.params - (1 if shape.tied else 2) * embedding) // shape.layers
    return {
        "weights": whole + -(-(b * shape.params - whole) // ranks),
        "gathered": max(LAYERS * layer, 2 * (embedding - whole)),
    }
