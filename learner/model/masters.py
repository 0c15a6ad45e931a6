"""The trained weights of one optimizer: float32 masters, and the copies that the model computes with
(learner.model.policy says why).

With a float32 model both are the same tensors. The master of a sharded weight (learner.model.bases.sharded) is this
rank's rows, in the model's own memory; FSDP2 sums its gradients over micro-batches and ranks, and makes the copy that
the model computes with.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rollout.weights import Source


class Masters:
    """The weights that are trained, their masters, and the steps between both: gradients to the masters, values back.

    Args:
        weights: name -> weight of the model. It is converted to `dtype`; its master keeps the values in float32.
        dtype: the dtype that the model computes in.
        keep: whether there are masters; else the optimizer updates the model's own weights.
        wide: names of the weights that the model computes with in float32, whatever `dtype` is.

    Attributes:
        weights: name -> the weight that the model computes with.
        named: name -> the weight that the optimizer updates: the master, or the model's own weight if that is float32
            or keep is false.
        divided: names of the sharded weights.
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
        """Returns the sources of the whole weights, by name. All ranks must write sharded weights together, in this
        order."""
        return {name: Source(weight.shape, partial(self._write, name)) for name, weight in self.weights.items()}

    def as_shards(self, name: str, rows: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor as a DTensor of the whole, on the same memory. The tensor may be the
        weight or its moments. If the weight is not sharded, the tensor is returned as it is."""
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
        """Returns this rank's rows of a tensor of the whole weight's shape; all of it if the weight is not sharded."""
        if name not in self.divided:
            return whole
        return whole[own_rows(self.weights[name].device_mesh, whole.shape[0])]

    def _write(self, name: str, place: Tensor) -> None:
        place.copy_(self.whole(name))

    @torch.no_grad()
    def whole(self, name: str, part: Callable[[Tensor], Tensor] = lambda weight: weight) -> Tensor:
        """Returns a whole weight as the model computes with it, or what `part` makes of its columns. For a sharded
        weight all ranks must call it together, and each gets the whole."""
        own = part(self.named[name].detach()).to(self.dtype)
        if name not in self.divided:
            return own
        divided: Any = self.as_shards(name, own)
        whole: Tensor = divided.full_tensor()
        return whole

    def clear_gradients(self) -> None:
        """Drops all gradients. It must be called before the first micro-batch, since a step that failed half-way may
        have left some."""
        for name, weight in self.weights.items():
            self.named[name].grad = weight.grad = None

    def collect_gradients(self) -> None:
        """Adds the gradients of a micro-batch to those of the masters, in float32."""
        together = _Sums()
        for name, weight in self.weights.items():
            master = self.named[name]
            if master is weight or weight.grad is None:
                continue
            if name in self.divided:
                master.grad = weight.grad.to_local()
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            elif weight.is_cuda:
                together.add(master.grad, weight.grad)
            else:
                master.grad.add_(weight.grad)
            weight.grad = None
        together.flush()

    @torch.no_grad()
    def sync(self) -> None:
        """Copies the masters into the weights that the model computes with; call it after each change of the
        masters."""
        own = [name for name in self.weights if self.named[name] is not self.weights[name] and name not in self.divided]
        if own:
            torch._foreach_copy_([self.weights[name] for name in own], [self.named[name] for name in own])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets masters and model weights. Raises ValueError if names or shapes differ."""
        if odd := difference(self.named, tensors):
            raise ValueError(
                f"weights: must have the names and shapes of this model, {odd}; compare learner.lora with r and "
                "target_modules in the adapter's adapter_config.json"
            )
        with torch.no_grad():
            for name, master in self.named.items():
                master.copy_(tensors[name])
        self.sync()


MOST_TOGETHER = 2**23  # elements, whose float32 copies take 32 MiB


class _Sums:
    """Sums of gradients on a card, many in one operation: the matrices of an adapter, of which a model has hundreds,
    take longer to start one by one than to add. At most MOST_TOGETHER elements wait, with float32 copies while they
    are added; a larger tensor is added by itself."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._more: list[Tensor] = []
        self._waiting = 0

    def add(self, total: Tensor, more: Tensor) -> None:
        """Adds `more`, of any type, to `total`, float32, by the next `flush` at the latest."""
        if more.numel() > MOST_TOGETHER:
            total.add_(more)
            return
        if self._waiting + more.numel() > MOST_TOGETHER:
            self.flush()
        self._sums.append(total)
        self._more.append(more)
        self._waiting += more.numel()

    def flush(self) -> None:
        if not self._sums:
            return
        widened = [torch.empty_like(each) for each in self._sums]
        torch._foreach_copy_(widened, self._more)
        torch._foreach_add_(self._sums, widened)
        self._sums, self._more, self._waiting = [], [], 0


def own_rows(mesh: Any, count: int) -> slice:
    """Returns this rank's part of `count` rows, divided as by torch.chunk; the last ranks may have fewer rows, or
    none."""
    each = -(-count // mesh.size())
    start = min(each * mesh.get_local_rank(), count)
    return slice(start, min(start + each, count))


def difference(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Returns how names and shapes differ, as part of a sentence; "" if they do not."""
    shapes = [{name: tuple(tensor.shape) for name, tensor in one.items()} for one in (wanted, found)]
    odd = sorted(name for name in wanted.keys() | found.keys() if shapes[0].get(name) != shapes[1].get(name))
    if not odd:
        return ""
    return f"{len(odd)} differ, first {odd[0]}: wanted {shapes[0].get(odd[0])}, got {shapes[1].get(odd[0])}"


def _master(weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Returns the master of a weight, and converts the weight to `dtype`. The master is a float32 copy; if `dtype` is
    float32 it is the weight itself, and if the weight is sharded it is this rank's rows."""
    if hasattr(weight, "to_local"):
        divided: Any = weight.detach()
        rows: Tensor = divided.to_local()
        return rows.requires_grad_()
    if dtype == torch.float32:
        return weight
    master = weight.detach().float().clone().requires_grad_()
    weight.data = weight.data.to(dtype)
    return master
