"""A scalar head: one number of a hidden state, s = w . h, as transformers' sequence classification with one label has
it (`score`, without bias). Reward and value models are such a head and an adapter on the base of all roles.

It is float32 over a base in 16 bits, too: a reward near 10 in bfloat16 would be rounded to a sixteenth.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ScalarHead(nn.Module):
    """weight: [1, H], of any floating type."""

    def __init__(self, weight: Float[Tensor, "1 H"]) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().to(torch.float32))

    @classmethod
    def zeros(cls, width: int, device: torch.device) -> "ScalarHead":
        """One that says 0 of every state; its first gradient is the states' and not 0."""
        return cls(torch.zeros(1, width, device=device))

    def forward(self, hidden: Float[Tensor, "N H"]) -> Float[Tensor, " N"]:
        """float32 numbers of the states, which may have 16 bits."""
        return hidden.float() @ self.weight[0]
