"""The output embedding as the operations of learner.model.logprob take it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def gathered_head(lm: Any) -> Iterator[Tensor]:
    """[V, H] the whole weight; of a base in shards (learner.model.sharded_base) it is there within this block only, in
    which all ranks must be."""
    module = lm.get_output_embeddings()
    if not hasattr(module, "unshard"):  # FSDP2's; its import takes time, and most runs do not need it
        yield module.weight
        return
    module.unshard()
    try:
        yield module.weight
    finally:
        module.reshard()


def check_ids(head: Tensor, highest: int) -> None:
    """Raises ValueError if a token id is beyond the vocabulary of that head, [V, H]."""
    if highest >= len(head):
        raise ValueError(
            f"token ids: must be below the vocabulary of model.path, {len(head)}, got {highest}; the rollouts were "
            "made with another tokenizer or model"
        )
