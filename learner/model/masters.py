"""The weights of one optimizer: float32 masters, and the copies that the model computes with.

With a float32 model both are the same tensors. Why: learner.model.policy.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn


class Masters:
    """Of the weights that train.

    Args:
        weights: name -> the model's own; each becomes `dtype`, its master keeps what it was in float32.
        keep: whether there are masters at all; else the optimizer updates the model's own weights.
        wide: names of those that the model computes with in float32, whatever `dtype` is.

    Attributes:
        weights: name -> what the model computes with.
        named: name -> the float32 weight to optimize; the model's own if it is float32, or if keep is false.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        dtype: torch.dtype,
        *,
        keep: bool = True,
        wide: Collection[str] = (),
    ) -> None:
        self.weights = dict(weights)
        self.named = {
            name: _master(weight, dtype) if keep and name not in wide else weight for name, weight in weights.items()
        }

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
            master.grad = weight.grad.float() if master.grad is None else master.grad.add_(weight.grad)
            weight.grad = None

    @torch.no_grad()
    def sync(self) -> None:
        """Masters -> the copy that the model computes with; to be called after each change of the masters."""
        for name, weight in self.weights.items():
            if self.named[name] is not weight:
                weight.copy_(self.named[name])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets masters and model. Raises ValueError if names or shapes are others."""
        wanted = {name: master.shape for name, master in self.named.items()}
        found = {name: tensor.shape for name, tensor in tensors.items()}
        if wanted != found:
            names = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
            raise ValueError(
                f"weights: names and shapes must be this model's, {len(names)} differ, first {names[0]}: "
                f"wanted {wanted.get(names[0])}, got {found.get(names[0])}; compare learner.lora with r and "
                "target_modules in the adapter's adapter_config.json"
            )
        with torch.no_grad():
            for name, master in self.named.items():
                master.copy_(tensors[name])
        self.sync()


def _master(weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A float32 copy of `weight`, which itself becomes `dtype`; for float32 the weight itself."""
    if dtype == torch.float32:
        return weight
    master = weight.detach().float().clone().requires_grad_()
    weight.data = weight.data.to(dtype)
    return master
