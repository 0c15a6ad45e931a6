"""Whether a model's logits are what learner.model.logits takes them for: settled by trying, in float32 over a wide
range.

The products of its output embedding are replaced by known numbers, and what the model makes of them is compared. So
neither the rounding of bfloat16 nor small weights hide a factor or a cap that no known setting of the config names.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from learner.model.logits import Logits

WIDEST = 50.0  # of the numbers, either sign: beyond what trained models say, and within float32
TOLERANCE = {torch.float32: 1e-4}  # share of the largest; a model that rounds its logits itself: as below
ROUNDED = 5e-3
SAME_STATES = 1e-2  # relative norm of a difference; the same computation twice


@torch.no_grad()
def check_head(lm: Any, logits: Logits, hidden: Callable[[Tensor], Tensor], path: str) -> None:
    """Raises ValueError if the logits of `lm` are not `logits` of head @ hidden.

    Args:
        hidden: ids [1, L] -> [L, H] the final states that the learner multiplies with the head.
    """
    head = lm.get_output_embeddings()
    ids = torch.arange(1, min(9, len(head.weight)), device=head.weight.device)[None]
    states: list[Tensor] = []
    products: list[Tensor] = []

    def replace(module: Any, inputs: Any, output: Tensor) -> Tensor:
        states.append(inputs[0])
        products.append(torch.linspace(-WIDEST, WIDEST, output.numel(), device=output.device).view(output.shape))
        return products[-1].clone()

    handle = head.register_forward_hook(replace)
    try:
        own: Tensor = lm(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    if len(products) != 1 or own.shape != products[0].shape:
        raise ValueError(
            f"model.path: {path} does not make its logits with its output embedding alone; train another architecture"
        )
    ours = hidden(ids).float()
    if bool((~torch.isfinite(ours)).any()):  # though its weights are: learner.model.base
        kind = str(head.weight.dtype).removeprefix("torch.")
        raise ValueError(
            f"model.dtype: {path} computes numbers in {kind} that are not finite, though all of its weights are; set a "
            "type of a wider range (bfloat16, float32), or give another model"
        )
    moved = float((states[0].flatten(0, -2).float() - ours).norm() / ours.norm().clamp(min=1e-6))
    if not moved <= SAME_STATES:
        raise ValueError(
            f"model.path: {path} does something to its final states before the output embedding (they differ by "
            f"{moved:.1e} of their norm); its logprobs would be wrong. Train another architecture"
        )
    wanted = logits.of_(products[0], 1.0)
    error = float((own.float() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
    if not error <= TOLERANCE.get(own.dtype, ROUNDED):
        raise ValueError(
            f"model.path: {path} does something to its logits after the output embedding that its config does not name "
            f"(they differ by {error:.1e} of the largest); its logprobs would be wrong. Train another architecture"
        )
