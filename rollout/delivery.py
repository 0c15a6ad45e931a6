"""Proof that a generator holds the policy it was sent: digest of the bytes, and logprobs of fixed tokens.

Silent non-delivery is the costliest bug of this field: an adapter that never reaches the sampler looks like staleness.
"""

import asyncio
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.actor import Shared
from rollout.types import Adapter, Weights

# max |difference| in nats between learner and generator on the probe, by compute type: fp32 agrees to about 1e-5,
# bf16 to about 6e-2 on a 25M model, and grows with depth. Weights that are merged (learner.push) are rounded to 16 bits
# once more: on the demo in bf16 the probe differs by 0.033 nats rms instead of 0.030, by 0.14 at most either way. With
# keys and values in fp8 by 0.26 rms, 1.4 at most, on the demo in float32 (0.04 rms on the tokens that are sampled).
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1, "fp8": 5.0}
# Standard deviation of that difference per token, on the safe side. A push is also refused when the generator answers
# like the previous policy rather than like the new one, as soon as the two are SURE such deviations apart.
NOISE = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 4e-3, "fp8": 0.3}
SURE = 10.0


class DeliveryError(RuntimeError):
    """A generator does not hold the policy it was sent."""


class Receipt(NamedTuple):
    """What a generator says of a policy that it has taken.

    digest: sha256 hex of the bytes it loaded. load_s: seconds that it took. peak_memory: bytes of its process, since
    its start.
    """

    digest: str
    load_s: float
    peak_memory: float


class Answer(NamedTuple):
    """What learner or generator says of the N probe tokens: [N-1] nats under the newest policy, temperature 1; and the
    seconds that it took."""

    logprobs: npt.NDArray[np.float32]
    seconds: float


class Expected(NamedTuple):
    """The learner's answers: of the new policy, and of the one before it (None at first)."""

    new: Answer
    previous: Answer | None


@dataclass(frozen=True)
class Push:
    """An adapter (weights with learner.push merged or learner.mode full) on its way. `expected`: what the learner says
    of the N tokens probe_ids, which it works out while the policy travels."""

    adapter: Adapter | Weights
    probe_ids: tuple[int, ...]
    expected: asyncio.Future[Expected]
    dtype: str

    @cached_property
    def shared(self) -> Shared[Adapter | Weights]:
        """The policy as one argument for all generators."""
        return Shared(self.adapter)

    def check_digest(self, worker: str, digest: str) -> None:
        """DeliveryError if other bytes were loaded than were sent."""
        if digest != self.adapter.digest:
            raise DeliveryError(
                f"{worker}: adapter v{self.adapter.version} arrived with digest {digest[:12]}, sent was "
                f"{self.adapter.digest[:12]}: the transport corrupts adapters"
            )

    async def verify(self, worker: str, answer: npt.NDArray[np.float32]) -> float:
        """max |difference| on the probe; DeliveryError names worker, version and difference."""
        version, expected = self.adapter.version, await asyncio.shield(self.expected)
        difference = float(np.abs(answer - expected.new.logprobs).max())
        if not difference <= TOLERANCE[self.dtype]:
            raise DeliveryError(
                f"{worker}: adapter v{version} is not what it generates with: max |logprob difference| on the probe is "
                f"{difference:.3g} nats, allowed is {TOLERANCE[self.dtype]:g} ({self.dtype}). The run stops, since it "
                "would learn from another policy's samples"
            )
        arrived = self._share_arrived(answer, expected)
        if arrived is not None and arrived < 0.5:
            raise DeliveryError(
                f"{worker}: generates with adapter v{version - 1}, though it acknowledged v{version}: on the probe, "
                f"{arrived:.0%} of the step between them has arrived (largest difference {difference:.3g} nats)"
            )
        return difference

    def _share_arrived(self, answer: npt.NDArray[np.float32], expected: Expected) -> float | None:
        """0 if the answer is the previous policy's, 1 if it is the new one's: the answer projected on the step between
        the two, over all probe tokens. None while noise of the compute type could decide it."""
        if expected.previous is None:
            return None
        step = (expected.new.logprobs - expected.previous.logprobs).astype(np.float64)
        length = float(np.linalg.norm(step))
        if length < SURE * NOISE[self.dtype]:
            return None
        return float((answer - expected.previous.logprobs) @ step) / length**2
