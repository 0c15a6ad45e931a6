"""The weights of one optimizer: float32 masters, and the copies that the model computes with.

With a float32 model both are the same tensors. Why: learner.model.policy. Of a weight in shards over several ranks
(learner.model.sharded_base) the master is this rank's rows, in the very memory of the model; FSDP2 sums its gradients
over micro-batches and ranks, and hands out the copy to compute with.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollout.weights import Source


class Masters:
    """Of the weights that train.

    Args:
        weights: name -> the model's own; each becomes `dtype`, its master keeps what it was in float32.
        keep: whether there are masters at all; else the optimizer updates the model's own weights.
        wide: names of those that the model computes with in float32, whatever `dtype` is.

    Attributes:
        weights: name -> what the model computes with.
        dtype: that the model computes in.
        named: name -> the float32 weight to optimize; the model's own if it is float32, or if keep is false.
        divided: names of those in shards.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        *,
        keep: bool = True,
        wide: Collection[str] = (),
    ) -> None:
        self.weights: dict[str, Any] = dict(weights)
        self.dtype = dtype
        self.divided = frozenset(name for name, weight in weights.items() if hasattr(weight, "full_tensor"))
        self.named = {
            name: _master(weight, dtype) if keep and name not in wide else weight for name, weight in weights.items()
        }

    def sources(self) -> dict[str, Source]:
        """Name -> how the whole weight is written; for shards all ranks must do it, in this order."""
        return {name: Source(weight.shape, partial(self._write, name)) for name, weight in self.weights.items()}

    def as_shards(self, name: str, rows: Tensor) -> Tensor:
        """This rank's rows of something as a part of the whole, on the same memory; what is not in shards as it is."""
        if name not in self.divided:
            return rows.detach()
        of = self.weights[name]
        shape = torch.Size((of.shape[0], *rows.shape[1:]))
        whole: Tensor = type(of.data).from_local(
            rows.detach().contiguous(), of.device_mesh, of.placements, run_check=False,
            shape=shape, stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip
        return whole

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """Of something as large as a whole weight: this rank's rows, where the weight is in shards."""
        if name not in self.divided:
            return whole
        return whole[own_rows(self.weights[name].device_mesh, whole.shape[0])]

    def _write(self, name: str, place: Tensor) -> None:
        place.copy_(self.whole(name))

    @torch.no_grad()
    def whole(self, name: str, part: Callable[[Tensor], Tensor] = lambda weight: weight) -> Tensor:
        """A weight as the model computes with it, or a part of its columns; of one in shards all ranks must ask for it,
        and each gets all."""
        own = part(self.named[name].detach()).to(self.dtype)
        if name not in self.divided:
            return own
        divided: Any = self.as_shards(name, own)
        whole: Tensor = divided.full_tensor()
        return whole

    def clear_gradients(self) -> None:
        """To be called before the first micro-batch; a step that failed half-way may have left some."""
        for name, weight in self.weights.items():
            self.named[name].grad = weight.grad = None

    def collect_gradients(self) -> None:
        """Adds the gradients of a micro-batch to those of the masters, in float32."""
        for name, weight in self.weights.items():
            master = self.named[name]
            if master is weight or weight.grad is None:
                continue
            if name in self.divided:
                master.grad = weight.grad.to_local()
                continue
            master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
            weight.grad = None

    @torch.no_grad()
    def sync(self) -> None:
        """Masters -> the copy that the model computes with; to be called after each change of the masters."""
        for name, weight in self.weights.items():
            if self.named[name] is not weight and name not in self.divided:
                weight.copy_(self.named[name])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets masters and model. Raises ValueError if names or shapes are others."""
        if odd := difference(self.named, tensors):
            raise ValueError(
                f"weights: must have the names and shapes of this model, {odd}; compare learner.lora with r and "
                "target_modules in the adapter's adapter_config.json"
            )
        with torch.no_grad():
            for name, master in self.named.items():
                master.copy_(tensors[name])
        self.sync()


def own_rows(mesh: Any, count: int) -> slice:
    """This rank's of so many rows, as torch.chunk divides them; the last ranks may have fewer, or none."""
    each = -(-count // mesh.size())
    start = min(each * mesh.get_local_rank(), count)
    return slice(start, min(start + each, count))


def difference(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """How names and shapes differ, as part of a sentence; "" if they do not."""
    shapes = [{name: tuple(tensor.shape) for name, tensor in one.items()} for one in (wanted, found)]
    odd = sorted(name for name in wanted.keys() | found.keys() if shapes[0].get(name) != shapes[1].get(name))
    if not odd:
        return ""
    return f"{len(odd)} differ, first {odd[0]}: wanted {shapes[0].get(odd[0])}, got {shapes[1].get(odd[0])}"


def _master(weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A float32 copy of `weight`, which itself becomes `dtype`; for float32 the weight itself; for shards this rank's
    rows."""
    if hasattr(weight, "to_local"):
        divided: Any = weight.detach()
        rows: Tensor = divided.to_local()
        return rows.requires_grad_()
    if dtype == torch.float32:
        return weight
    master = weight.detach().float().clone().requires_grad_()
    weight.data = weight.data.to(dtype)
    return master
