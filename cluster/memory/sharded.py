"""The memory model of a learner's base that is divided among its ranks (memory.base: sharded). Pure functions."""

from cluster.memory.shape import Shape
from cluster.memory.units import Parts

LAYERS = 3  # that are whole at once: the one at work, the next, gathered meanwhile, and the buffer that it arrives in
FILE_BYTES = 2**30  # of this rank's rows that a checkpoint of a whole model writes at once


def divided_params(shape: Shape, ranks: int) -> int:
    """Weights that one rank has: its rows of all matrices, and a tied embedding, which stays whole."""
    return _whole(shape) + -(-(shape.params - _whole(shape)) // ranks)


def sharded_base_bytes(shape: Shape, b: int, ranks: int) -> Parts:
    """Of one rank, of a base that is frozen; b: bytes per element.

    gathered: the most that is whole for a while, of layers, or an embedding and the buffer that it arrives in.
    """
    embedding = b * shape.vocab * shape.hidden
    return {
        "weights": b * divided_params(shape, ranks),
        "gathered": max(LAYERS * b * _layer(shape), 2 * (embedding - b * _whole(shape))),
    }


def sharded_training_bytes(shape: Shape, b: int) -> Parts:
    """Of one rank, of a base that is trained, beside float32 masters, gradients and states of divided_params.

    weights: the copy in model.dtype of a tied embedding; that of all others is gathered. gathered: as above, and of
    what is behind it in the backward pass, twice, the gradient in model.dtype and in float32, which the ranks sum. That
    of a head apart stays in float32 to the end of the pass.
    """
    embedding = shape.vocab * shape.hidden
    apart = 0 if shape.tied else embedding
    return {
        "weights": b * _whole(shape) if b < 4 else 0,
        "gathered": max((LAYERS * b + 2 * (b + 4)) * _layer(shape) + 4 * apart, (2 * b + b + 4) * apart),
    }


def _whole(shape: Shape) -> int:
    return shape.vocab * shape.hidden if shape.tied else 0


def _layer(shape: Shape) -> int:
    embeddings = (1 if shape.tied else 2) * shape.vocab * shape.hidden
    return (shape.params - embeddings) // shape.layers
