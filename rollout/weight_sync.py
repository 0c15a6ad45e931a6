"""Proof that a generator holds the policy it was sent. Silent non-delivery is the costliest bug of this field: an
adapter that never reaches the sampler looks like staleness.

Three checks, each of which finds what those before it let pass:

    digest      of the bytes that arrived (check_digest): a transport that corrupts or mixes up policies.
    tensors     read back from what the engine computes with, bit for bit (Push.check_held): a load that did nothing, in
                part, or into another slot; a copy that was not renewed. Of an adapter all of it, so any step that
                changes one bit is seen; of whole weights some columns of each matrix (rollout.tensor_digests).
    logprobs    of probe tokens, against the learner's: another base model, prompt cache or kernel gone wrong
                (Push.check_logprobs, as far as the compute type is exact); and, whatever the engine says about its
                tensors, logprobs that do not follow the learner's from version to version (rollout.evidence).
"""

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.actor import Shared
from rollout.evidence import Evidence
from rollout.types import Held, PolicyId, SentPolicy

# Most nats that learner and generator may differ by on the probe, by compute type. float32: at any token; 5e-5 is
# measured. The others: rms without the token that differs most, which in 16 bits says nothing (rollout.evidence). Of
# 19,536 honest answers to the demo's probes in bfloat16 (adapters, merged and whole weights) that was 0.10 at most, and
# 0.03 in the median; 568 of them differed by more than 0.5 at a token. float16: 0.006 at most; fp8 KV cache: 0.36. A
# deeper model may differ by more.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.025, "fp8": 0.8}


def difference(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32], dtype: str) -> float:
    """Of two sides' logprobs of the same tokens, to be compared with TOLERANCE; not finite if a logprob is not."""
    apart = np.sort(np.abs(found - expected))
    if dtype == "float32" or not np.isfinite(apart[-1]):
        return float(apart[-1])
    return float(np.sqrt(np.mean(np.square(apart[: max(len(apart) - 1, 1)]))))


class DeliveryError(RuntimeError):
    """A generator does not hold the policy it was sent."""


class Receipt(NamedTuple):
    """A generator's answer to a policy that it was sent.

    digest: of the bytes it loaded. load_s: seconds that it took. peak_memory: as of
    Engine.peak_memory.
    """

    digest: str
    load_s: float
    peak_memory: float


def check_digest(policy: PolicyId | SentPolicy, worker: str, digest: str) -> None:
    """DeliveryError if the worker loaded other bytes than were sent."""
    if digest != policy.digest:
        raise DeliveryError(
            f"{worker}: policy v{policy.version} arrived with digest {digest[:12]}, sent was "
            f"{policy.digest[:12]}: the transport corrupts policies"
        )


class Answer(NamedTuple):
    """The answer of learner or generator to the probe, under the newest policy.

    logprobs: [N-1] nats of the N probe tokens, temperature 1. held: digests of the tensors that it computes with; in
    the learner's answer, of those that a generator must hold. seconds: that the answer took.
    """

    logprobs: npt.NDArray[np.float32]
    held: Held
    seconds: float


@dataclass(frozen=True)
class Push:
    """An adapter (weights with learner.push merged or learner.mode full) on its way from the learner to all generators.
    `expected`: the learner's answer to the N tokens probe_ids, which it works out while the policy travels."""

    policy: Shared[SentPolicy]
    policy_id: PolicyId
    probe_ids: tuple[int, ...]
    expected: asyncio.Future[Answer]
    dtype: str

    async def verify(self, worker: str, answer: Answer, evidence: Evidence) -> None:
        """DeliveryError names worker, version, and what differs. `evidence` is the worker's, and grows by this."""
        expected = await asyncio.shield(self.expected)
        self.check_held(worker, answer.held, expected.held)
        self.check_logprobs(worker, answer.logprobs, expected.logprobs)
        self.check_movement(worker, answer.logprobs, expected.logprobs, evidence)

    def check_held(self, worker: str, found: Held, expected: Held) -> None:
        """DeliveryError unless the engine computes with the very tensors that were sent, and with no others.

        What it cannot read back (Held.unread) is left to the logprobs.
        """
        names = expected.tensors.keys()
        wrong = {name for name, digest in found.tensors.items() if expected.tensors.get(name) != digest}
        differing = sorted(wrong | (names - found.tensors.keys() - set(found.unread)))
        if differing:
            raise DeliveryError(
                f"{worker}: acknowledged v{self.policy_id.version}, but its engine computes with other tensors than "
                f"were sent: {len(differing)} of {len(names)} differ, first {differing[0]}. The run stops, since it "
                "would learn from another policy's samples; start it again from its last checkpoint, and report this "
                "line with the versions of vllm and torch if it comes back"
            )

    def check_logprobs(self, worker: str, found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
        """DeliveryError if they differ by more than the compute type explains."""
        apart = difference(found, expected, self.dtype)
        if not apart <= TOLERANCE[self.dtype]:
            raise DeliveryError(
                f"{worker}: adapter v{self.policy_id.version} is not what it generates with: its logprobs of the probe "
                f"differ from the learner's by {apart:.3g} nats, allowed is {TOLERANCE[self.dtype]:g} ({self.dtype}). "
                "The run stops, since it would learn from another policy's samples"
            )

    def check_movement(
        self,
        worker: str,
        found: npt.NDArray[np.float32],
        expected: npt.NDArray[np.float32],
        evidence: Evidence,
    ) -> None:
        """DeliveryError if the generator's logprobs do not follow the learner's from version to version."""
        version = self.policy_id.version
        stuck = evidence.add(version, self.probe_ids, found, expected)
        if stuck is not None:
            raise DeliveryError(
                f"{worker}: acknowledged v{version}, but generates as under v{stuck.since}: since then the learner's "
                f"logprobs of the probe went {stuck.way:.2g} nats, its own went {stuck.share:.0%} of that way. "
                "The run stops, since it would learn from another policy's samples; start it again from its last "
                "checkpoint, and report this line with the versions of vllm and torch if it comes back"
            )
