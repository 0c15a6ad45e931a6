"""Proves that a generator computes with the policy that the learner sent. Silent non-delivery is the costliest bug of
this field: a run whose adapter never reaches the sampler looks like a run with stale samples.

There are three checks, each of which finds faults that the ones before it miss:

    digest      check_digest compares the digest of the bytes that arrived. It finds a transport that corrupts policies
                or confuses them.
    tensors     Push.check_held compares, bit for bit, tensors read back from the engine. It finds a load that did
                nothing, only a part, or wrote into another slot, and a copy that was not renewed. Adapters are read
                back whole, of whole weights some columns of each matrix (rollout.weights).
    logprobs    Push.check_logprobs compares the logprobs of the probe tokens with the learner's, as closely as the
                dtype allows. It finds another base model, and a prefix cache or kernel that goes wrong.
                Push.check_movement finds an engine whose logprobs do not follow the learner's between versions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cluster.actor import Shared
from rollout.types import Held, PolicyId, SentPolicy

# Evidence tests whether an engine's logprobs of the probe tokens follow the learner's from version to version.
#
# An engine that is stuck at one policy gives the same logprobs for ever. Comparing two versions of one engine cancels
# what always sets engine and learner apart (kernels, 16 bits, an fp8 cache). It does not cancel rounding, since both
# sides round the new weights anew. In 16 bits that rounding can exceed a small training step, so the logprobs of a
# correct engine may stand still while the learner's move. Therefore two versions are compared only if the learner's
# logprobs moved between them FAR times as far as learner and engine differed at the first of the two: then most of the
# movement is the policy's. A stuck engine falls further behind with each version, until it is found;
# benchmarks/engine/delivery_power.py measures after how many.
#
# Rounding is uneven: in bfloat16 the two sides' logprobs of a token of the demo's probes differ by 0.01 nats (median),
# but for one token in 2,000, mostly an unlikely one, by 0.5 to 1.7. With squared differences that token would decide.
# So movement is a mean of absolute values, and leaves out the token that lowers the engine's share most.


Logprobs = npt.NDArray[np.float32]

FAR = 1.8
ARRIVED = 1 / 5  # least share of the learner's movement that an engine with the right policy shows; a stuck one shows 0
FEW = 32  # tokens; a mean over fewer says little
KEPT = 16  # versions to compare with, besides the first one


class Stuck(NamedTuple):
    """An engine whose logprobs do not follow the learner's.

    since: the earlier policy version of the comparison. share: the engine's movement since then, as a share of the
    learner's. way: the learner's movement, nats, a mean over tokens.
    """

    since: int
    share: float
    way: float


class Evidence:
    """The logprobs of the probe tokens from one worker and from the learner, for the policy versions so far.

    settled: whether a stuck engine would have been found by now with the present probe tokens.
    """

    def __init__(self) -> None:
        self.settled = False
        self._ids: tuple[int, ...] = ()
        self._first: list[tuple[int, Logprobs, Logprobs]] = []
        self._later: deque[tuple[int, Logprobs, Logprobs]] = deque(maxlen=KEPT)

    def add(self, version: int, ids: tuple[int, ...], engine: Logprobs, learner: Logprobs) -> Stuck | None:
        """Adds both sides' [N-1] logprobs of the N probe tokens `ids`; other tokens than before start anew.

        Returns the comparison in which the engine followed least, if that is too little; None if the engine followed,
        or if nothing can be said yet.
        """
        if ids != self._ids:
            self._ids, self.settled = ids, False
            self._first.clear()
            self._later.clear()
        stuck = None
        for since, engine_then, learner_then in [*self._first, *self._later]:
            way, off = learner.astype(np.float64) - learner_then, engine_then - learner_then
            if len(way) < FEW:
                continue
            self.settled |= _compare(np.zeros_like(way), way, off) is not None
            found = _compare(engine - engine_then, way, off)
            if found is not None and found[0] < min(ARRIVED, stuck.share if stuck else ARRIVED):
                stuck = Stuck(since, *found)
        (self._later if self._first else self._first).append((version, engine, learner))
        return stuck


def _compare(gone: npt.NDArray[np.floating], way: npt.NDArray[np.float64], off: Logprobs) -> tuple[float, float] | None:
    """Returns (the engine's movement as a share of the learner's, the learner's movement, a mean over tokens in nats).

    gone, way: [N-1] change of the engine's and of the learner's logprobs between two versions. off: [N-1] how far they
    differed at the earlier version. None if the learner moved too little to tell.
    """
    along = gone * np.sign(way)
    rest = np.argsort(along - ARRIVED * np.abs(way))[1:]
    length = float(np.abs(way[rest]).mean())
    if length <= FAR * np.abs(off[rest]).mean():
        return None
    return float(along[rest].mean()) / length, length


# The greatest difference, in nats, that learner and generator may have on the probe, by dtype. For float32 it is that
# of any token (5e-5 was measured). For the others it is the rms over tokens without the one that differs most, which in
# 16 bits says nothing. Over 19,536 correct answers to the demo's probes in bfloat16 (adapters, merged and whole
# weights) the rms was 0.10 at most and 0.03 in the median; 568 of them differed by more than 0.5 at a token. With
# float16 it was 0.006 at most, with an fp8 KV cache 0.36. A deeper model may differ by more.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.025, "fp8": 0.8}


def difference(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32], dtype: str) -> float:
    """How far two sides' logprobs [N-1] of the same tokens differ, to be compared with TOLERANCE, in nats. The result
    is not finite if a logprob is not."""
    apart = np.sort(np.abs(found - expected))
    if dtype == "float32" or not np.isfinite(apart[-1]):
        return float(apart[-1])
    return float(np.sqrt(np.mean(np.square(apart[: max(len(apart) - 1, 1)]))))


class Receipt(NamedTuple):
    """A generator's answer when it has loaded a policy.

    digest: of the bytes that it loaded. load_s: seconds that the loading took. peak_memory: see Engine.peak_memory.
    """

    digest: str
    load_s: float
    peak_memory: float


def check_digest(policy: PolicyId | SentPolicy, worker: str, digest: str) -> None:
    """Raises RuntimeError if the worker loaded other bytes than were sent."""
    if digest != policy.digest:
        raise RuntimeError(
            f"{worker}: policy v{policy.version} arrived with digest {digest[:12]}, sent was "
            f"{policy.digest[:12]}: the transport corrupts policies"
        )


class Answer(NamedTuple):
    """The answer of the learner or of a generator to the probe, under the newest policy.

    logprobs: [N-1] nats of the N probe tokens, at temperature 1. held: in a generator's answer the digests of the
    tensors that it computes with, in the learner's those that a generator must have. seconds: time the answer took.
    """

    logprobs: npt.NDArray[np.float32]
    held: Held
    seconds: float


@dataclass(frozen=True)
class Push:
    """A policy on its way from the learner to all generators, with what is needed to prove its arrival.

    policy: handle of the adapter, or of weights with learner.push merged or learner.mode full. probe_ids: N tokens.
    expected: the learner's answer to the probe, which it computes while the policy is sent. dtype: key of TOLERANCE.
    """

    policy: Shared[SentPolicy]
    policy_id: PolicyId
    probe_ids: tuple[int, ...]
    expected: asyncio.Future[Answer]
    dtype: str

    async def verify(self, worker: str, answer: Answer, evidence: Evidence) -> None:
        """Raises RuntimeError with the worker, the version and what differs. The answer is added to `evidence`, the
        worker's."""
        expected = await asyncio.shield(self.expected)
        self.check_held(worker, answer.held, expected.held)
        self.check_logprobs(worker, answer.logprobs, expected.logprobs)
        self.check_movement(worker, answer.logprobs, expected.logprobs, evidence)

    def check_held(self, worker: str, found: Held, expected: Held) -> None:
        """Raises RuntimeError unless the engine computes with the very tensors that were sent, and with no others.

        Tensors that cannot be read back (Held.unread) are left to the comparison of logprobs.
        """
        names = expected.tensors.keys()
        wrong = {name for name, digest in found.tensors.items() if expected.tensors.get(name) != digest}
        differing = sorted(wrong | (names - found.tensors.keys() - set(found.unread)))
        if differing:
            raise RuntimeError(
                f"{worker}: acknowledged v{self.policy_id.version}, but its engine computes with other tensors than "
                f"were sent: {len(differing)} of {len(names)} differ, first {differing[0]}. The run stops, since it "
                "would learn from another policy's samples; start it again from its last checkpoint, and report this "
                "line with the versions of vllm and torch if it comes back"
            )

    def check_logprobs(self, worker: str, found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
        """Raises RuntimeError if the logprobs [N-1] differ by more than TOLERANCE."""
        apart = difference(found, expected, self.dtype)
        if not apart <= TOLERANCE[self.dtype]:
            raise RuntimeError(
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
        """Raises RuntimeError if the generator's logprobs do not follow the learner's from version to version."""
        version = self.policy_id.version
        stuck = evidence.add(version, self.probe_ids, found, expected)
        if stuck is not None:
            raise RuntimeError(
                f"{worker}: acknowledged v{version}, but generates as under v{stuck.since}: since then the learner's "
                f"logprobs of the probe went {stuck.way:.2g} nats, its own went {stuck.share:.0%} of that way. "
                "The run stops, since it would learn from another policy's samples; start it again from its last "
                "checkpoint, and report this line with the versions of vllm and torch if it comes back"
            )
