"""What some models do to the products of output embedding and hidden state before they are logits.

    z = cap tanh(scale r / cap), or z = scale r without a cap
Granite and Cohere scale; Gemma 2 caps (2408.00118, section 2: "logit soft-capping").
"""

from typing import Any, NamedTuple

from torch import Tensor

# Names in transformers' configs, and the exponent of the scale that each stands for.
SCALES = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}
MULTIPLIES = ("hyperclovax",)  # by what others call logits_scaling and divide by
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


class Logits(NamedTuple):
    """z as a function of r = head @ hidden, both in float32."""

    scale: float = 1.0
    cap: float | None = None

    def of_(self, products: Tensor, temperature: float) -> Tensor:
        """z / temperature, in the place of the products."""
        if self.cap is None:  # usually both are 1, and a pass over the logits is saved
            return products if temperature == self.scale else products.div_(temperature / self.scale)
        return products.mul_(self.scale / self.cap).tanh_().mul_(self.cap / temperature)

    def bend_(self, logits: Tensor, temperature: float) -> Tensor:
        """dz / dr / scale = 1 - (z / cap)^2 of z / temperature, in its place; only with a cap."""
        assert self.cap is not None
        return logits.mul_(temperature / self.cap).square_().neg_().add_(1.0)


PLAIN = Logits()


def logits_of(config: Any) -> Logits:
    """By a transformers config of text. What its names do not tell, learner.model finds out by trying."""
    scale, caps = 1.0, [cap for name in CAPS if (cap := getattr(config, name, None))]
    for name, exponent in SCALES.items():
        power = 1 if config.model_type in MULTIPLIES else exponent
        scale *= float(getattr(config, name, None) or 1.0) ** power
    return Logits(scale, float(caps[0]) if caps else None)
