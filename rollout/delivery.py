"""Proof that a generator holds the policy it was sent. Silent non-delivery is the costliest bug of this field: an
adapter that never reaches the sampler looks like staleness.

Three checks, each of which finds what those before it let pass:

    digest      of the bytes that arrived (check_digest): a transport that corrupts or mixes up policies.
    tensors     read back from what the engine computes with, bit for bit (Push.check_held): a load that did nothing,
    in
                part, or into another slot; a copy that was not renewed. Of an adapter all of it, so any step that
                changes one bit is seen; of whole weights some columns of each matrix (rollout.weights).
    logprobs    of probe tokens, against the learner's: another base model, prompt cache or kernel gone wrong
                (Push.check_logprobs, as far as the compute type is exact); and, whatever the engine says about its
                tensors, logprobs that do not follow the learner's from version to version.
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

# Whether an engine's logprobs of the probe tokens follow the learner's from policy version to policy version.
#
# A frozen engine gives the same logprobs for ever. Between two versions of one engine, what always sets it apart from
# the learner (kernels, 16 bits, an fp8 cache) cancels. Rounding does not: new weights are rounded anew, on both sides.
# In 16 bits that can be more than a small training step, so of two honest answers one may stand still while the other
# moves. Hence a pair of versions counts only if the learner's logprobs moved FAR times as far between them as they
# differed from the engine's at the first: then most of that way is policy, not rounding. A frozen engine falls further
# behind with each version, until it is found out. How many versions that takes: benchmarks/engine/delivery_power.py.
#
# Rounding is uneven: in bfloat16 the two sides' logprobs of a token of the demo's probes differ by 0.01 nats (median),
# of one token in 2,000, mostly an unlikely one, by 0.5 to 1.7. Squares would let that one decide. So a way is a mean of
# absolute values, and the token that lowers the engine's share most is left out: no single token stops a run.


Logprobs = npt.NDArray[np.float32]

FAR = 1.8
ARRIVED = 1 / 5  # share of the learner's way that an engine which has the policy goes at least; a frozen one goes none
FEW = 32  # tokens; with fewer a mean says little
KEPT = 16  # versions, besides the first


class Stuck(NamedTuple):
    """An engine that does not follow. share: the part of the learner's way since version `since` that it went as well;
    way: the length of that way, a mean over the tokens in nats."""

    since: int
    share: float
    way: float


class Evidence:
    """The logprobs of one worker and the learner so far; other probe tokens begin anew.

    settled: whether a frozen engine would have been found out by now, on these tokens.
    """

    def __init__(self) -> None:
        self.settled = False
        self._ids: tuple[int, ...] = ()
        self._first: list[tuple[int, Logprobs, Logprobs]] = []
        self._later: deque[tuple[int, Logprobs, Logprobs]] = deque(maxlen=KEPT)

    def add(self, version: int, ids: tuple[int, ...], engine: Logprobs, learner: Logprobs) -> Stuck | None:
        """Takes both sides' [N-1] logprobs of the N tokens. Returns the version since which the engine has followed the
        learner least, if that is too little; None if it has followed, or if nothing can be said yet."""
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
    """Of `gone`, which the engine's logprobs went where the learner's went `way`: the share and the length of that way.
    None if that is too short, for an engine that was `off` by so much before."""
    along = gone * np.sign(way)
    rest = np.argsort(along - ARRIVED * np.abs(way))[1:]
    length = float(np.abs(way[rest]).mean())
    if length <= FAR * np.abs(off[rest]).mean():
        return None
    return float(along[rest].mean()) / length, length


# Most nats that learner and generator may differ by on the probe, by compute type. float32: at any token; 5e-5 is
# measured. The others: rms without the token that differs most, which in 16 bits says nothing. Of
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


class Receipt(NamedTuple):
    """A generator's answer to a policy that it was sent.

    digest: of the bytes it loaded. load_s: seconds that it took. peak_memory: as of
    Engine.peak_memory.
    """

    digest: str
    load_s: float
    peak_memory: float


def check_digest(policy: PolicyId | SentPolicy, worker: str, digest: str) -> None:
    """RuntimeError if the worker loaded other bytes than were sent."""
    if digest != policy.digest:
        raise RuntimeError(
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
        """RuntimeError names worker, version, and what differs. `evidence` is the worker's, and grows by this."""
        expected = await asyncio.shield(self.expected)
        self.check_held(worker, answer.held, expected.held)
        self.check_logprobs(worker, answer.logprobs, expected.logprobs)
        self.check_movement(worker, answer.logprobs, expected.logprobs, evidence)

    def check_held(self, worker: str, found: Held, expected: Held) -> None:
        """RuntimeError unless the engine computes with the very tensors that were sent, and with no others.

        What it cannot read back (Held.unread) is left to the logprobs.
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
        """RuntimeError if they differ by more than the compute type explains."""
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
        """RuntimeError if the generator's logprobs do not follow the learner's from version to version."""
        version = self.policy_id.version
        stuck = evidence.add(version, self.probe_ids, found, expected)
        if stuck is not None:
            raise RuntimeError(
                f"{worker}: acknowledged v{version}, but generates as under v{stuck.since}: since then the learner's "
                f"logprobs of the probe went {stuck.way:.2g} nats, its own went {stuck.share:.0%} of that way. "
                "The run stops, since it would learn from another policy's samples; start it again from its last "
                "checkpoint, and report this line with the versions of vllm and torch if it comes back"
            )
