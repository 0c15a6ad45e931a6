"""The reference of a model that is trained as a whole in shards (memory.base: sharded): a second model, frozen, whose
shards have model.dtype, in the place of the first for a pass without gradient.

Not the first with other weights, as learner.model.reference has it: what FSDP2 gathers from is the float32 memory that
the optimizer updates, so there the second set would be float32 as well, and be copied in and out for each step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from learner.config import ModelConfig
from learner.model.base import load_base, to_eval
from learner.model.fusion import fuse_frozen
from learner.model.reference_config import check_reference


class ShardedReference:
    """It computes as the trained model does, whose classes and settings it has: kernels and attention are those that
    were tried with that one. All ranks make theirs at once, and are in its passes together.

    Args:
        lm: the trained model, ready for its passes.
        model: where the reference comes from; with model.reference null it is what the files of model.path hold.

    Raises:
        ReferenceConfigError: model.reference is not of the architecture of model.path.
        ValueError, WeightsError: its files cannot be read in parts, or at all (learner.model.sharded_base).
    """

    def __init__(self, lm: Any, model: ModelConfig, device: torch.device) -> None:
        key = "model.path"
        if model.reference is not None:
            check_reference(model.reference, model.source)
            model, key = model.model_copy(update={"path": model.reference, "revision": None}), "model.reference"
        self._lm = lm
        self._frozen = load_base(model, device, lora=False, sharded=True, trained=False, key=key)
        to_eval(self._frozen)
        fuse_frozen(self._frozen, on_card=device.type == "cuda")
        self._frozen.set_attn_implementation(lm.config._attn_implementation)

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Inside this block the reference's layers and head are in the place of the trained model's; no gradient may be
        taken."""
        own, self._lm._modules = self._lm._modules, self._frozen._modules
        try:
            yield
        finally:
            self._lm._modules = own
