"""The values that cross the border between a rollout worker and its generator. Numpy and a hash only.

Letters: P prompt tokens, T completion tokens, G completions per prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any, Literal, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from cluster.errors import WrongInput

# Seeds of what is sampled: the same for the same place in a run, whoever samples it and when.


def seed_of(*parts: object) -> int:
    """47 bits of them, so that neighbours (seed + j) never meet."""
    return int.from_bytes(hashlib.sha256("-".join(map(str, parts)).encode()).digest()[:6]) >> 1


def group_seed(run_seed: int, position: int, attempt: int) -> int:
    """Sampling seed of a group."""
    return seed_of(run_seed, position, attempt)


# What ends a completion beside its length: end tokens and stop strings.


def split(tokenizer: Any, strings: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Stop strings -> the ids of those that are a special token of the tokenizer, and the other strings.

    Strings are looked for in the text that reward functions are given, which has no special tokens, so such a string
    ends completions by its id. Raises WrongInput for one that has a special token among other text.
    """
    special = {token.content: int(id_) for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = tuple(special[text] for text in strings if text in special)
    others = tuple(text for text in strings if text not in special)
    for text in others:
        inside = next((token for token in special if token in text), None)
        if inside is not None:
            raise WrongInput(
                f"rollout.stop: {text!r} must not mix the special token {inside!r} with other text, since it is looked "
                f"for in text without special tokens; give {inside!r} alone, or a string without it"
            )
    return ids, others


# vLLM raises any temperature in (0, 0.01) to 0.01 with no more than a log line; the recorded logprobs would then
# belong to another temperature than the learner assumes.
MIN_TEMPERATURE = 0.01


class EngineError(RuntimeError):
    """Base of everything an engine raises about itself; a bad argument is a ValueError. It fails the call and not the
    engine (rollout.vllm.engine)."""


class AdapterCorrupt(EngineError):
    """The payload does not match the digest that came with it: rollout.weights takes it for no policy where newer
    weights have taken its place."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sampled continuation of a prompt. Compared by identity, since == of arrays is not one truth value.

    Attributes:
        token_ids: [T] int32, the end token included if it was sampled.
        logprobs: [T] float32, nats, at the temperature that was sampled with, and of the whole distribution also where
            top_p, top_k or min_p left some of it out; greedy sampling (temperature 0) records those at temperature 1.
        finish_reason: "stop" (an end token or a stop string) or "length" (max_tokens reached).
        versions: [T] int32, policy version that sampled each token: one, or with in_flight "continue" versions that
            never fall.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str
    versions: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample the completions of one prompt.

    Attributes:
        n: completions per prompt (G).
        max_tokens: tokens per completion, the end token included.
        temperature: 0 is greedy (then n must be 1), otherwise at least 0.01.
        seed: completion j is sampled with seed + j, so seeds of different prompts must differ by at least n,
            or two prompts share random streams. None: drawn from the engine's own seed.
        top_p, top_k, min_p: which tokens may be sampled, as of vLLM; 1, 0 and 0: all. Less than all only of an engine
            whose settings say so (EngineSettings.truncates), and at temperature 1 or 0.

    Raises:
        ValueError: a field is out of its range.
    """

    n: int
    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncated(self) -> bool:
        """Whether some tokens may not be sampled."""
        return (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0)

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise ValueError(f"n and max_tokens must be at least 1, got n={self.n}, max_tokens={self.max_tokens}")
        if self.temperature != 0 and not self.temperature >= MIN_TEMPERATURE:
            raise ValueError(f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, got {self.temperature}")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"greedy sampling gives {self.n} equal completions; set n=1 or temperature > 0")
        if self.seed is not None and self.seed < 0:
            raise ValueError(f"seed must be None or at least 0, got {self.seed}")
        if not 0 < self.top_p <= 1 or self.top_k < 0 or not 0 <= self.min_p < 1:
            raise ValueError(
                f"top_p in (0, 1], top_k >= 0, min_p in [0, 1), got {self.top_p}, {self.top_k}, {self.min_p}"
            )
        if self.truncated and self.temperature not in (0, 1):
            raise ValueError(f"top_p, top_k and min_p need temperature 1, got {self.temperature}")


class PolicyId(NamedTuple):
    """Which policy: its version, and the digest of an Adapter or Weights."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter on its way from the learner to the generators.

    Attributes:
        version: policy version, from 0, growing; each version is loaded once per engine.
        digest: sha256 of payload, hex.
        payload: safetensors bytes with PEFT's names (base_model.model.….lora_A.weight).
        config: the content of adapter_config.json; must be JSON.
    """

    version: int
    digest: str
    payload: bytes | memoryview
    config: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with the payload beside it (PEP 574): Ray puts it into shared memory, and readers find it there."""
        return _arrived_adapter, (self.version, self.digest, PickleBuffer(self.payload), self.config)

    @classmethod
    def build(cls, version: int, payload: bytes | memoryview, config: dict[str, Any]) -> Adapter:
        """Computes the digest. Raises ValueError for a negative version."""
        if version < 0:
            raise ValueError(f"adapter version must be at least 0, got {version}")
        return cls(version=version, digest=digest_of(payload), payload=payload, config=config)

    @property
    def policy_id(self) -> PolicyId:
        return PolicyId(self.version, self.digest)

    def verify(self) -> None:
        """Raises AdapterCorrupt if the payload is not the one that the digest was computed from."""
        _verify("adapter", self, digest_of(self.payload))


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of a model on their way from the learner to the generators: all of them (learner.mode: full), those that
    the adapter changes, merged with it (learner.push: merged), or none: the model as its folder has it. version: as of
    an Adapter.

    digest: digest_of_weights of the payload.
    payload: safetensors bytes with the names of the checkpoint, a weight that is tied to another left out. Layers that
    engines fuse (q, k and v; gate and up) come together or not at all.
    place: where other processes of this machine find them, too, if they can.
    """

    version: int
    digest: str
    payload: bytes | memoryview
    place: WeightsInFile | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """As an Adapter's."""
        return _arrived_weights, (self.version, self.digest, PickleBuffer(self.payload))

    @classmethod
    def build(cls, version: int, payload: bytes | memoryview) -> Weights:
        """Computes the digest."""
        return cls(version=version, digest=digest_of_weights(payload), payload=payload)

    @classmethod
    def unchanged(cls, version: int) -> Weights:
        """The model as its folder has it."""
        return cls.build(version, (2).to_bytes(8, "little") + b"{}")  # safetensors without a tensor

    @property
    def policy_id(self) -> PolicyId:
        return PolicyId(self.version, self.digest)

    def verify(self) -> None:
        """Raises AdapterCorrupt if the payload is not the one that the digest was computed from."""
        _verify("weights", self, digest_of_weights(self.payload))


class WeightsInFile(NamedTuple):
    """Where whole weights lie for processes of the learner's machine (rollout.weights).

    version, digest: as of Weights. machine: cluster.machine.name of the learner's. path, inode: of the file. offset: of
    their place in it. size: in bytes, of their payload.
    """

    version: int
    digest: str
    machine: str
    path: str
    inode: int
    offset: int
    size: int

    @property
    def policy_id(self) -> PolicyId:
        return PolicyId(self.version, self.digest)


SentPolicy = Adapter | Weights | WeightsInFile  # on its way from the learner to the generators


def _arrived_adapter(version: int, digest: str, payload: Any, config: dict[str, Any]) -> Adapter:
    return Adapter(version, digest, memoryview(payload), config)


def _arrived_weights(version: int, digest: str, payload: Any) -> Weights:
    return Weights(version, digest, memoryview(payload))


def _verify(what: str, update: Adapter | Weights, found: str) -> None:
    if found != update.digest:
        raise AdapterCorrupt(
            f"{what} v{update.version}: the digest of its {len(update.payload)} payload bytes must be "
            f"{update.digest[:12]}…, got {found[:12]}…; send it again from the learner"
        )


def digest_of(payload: bytes | memoryview) -> str:
    """sha256 of the payload, hex."""
    return hashlib.sha256(payload).hexdigest()


def digest_of_weights(payload: bytes | memoryview) -> str:
    """BLAKE3 of the payload, hex, by all cores. Whole weights are gigabytes, of which sha256 takes a second of a core
    for each."""
    return blake3(payload, max_threads=blake3.AUTO).hexdigest()


class Held(NamedTuple):
    """A policy as one process holds it.

    tensors: name -> sha256 hex (rollout.weights.digest_of_tensor) of an adapter's tensor, or of what is read of
    a weight (rollout.weights.read_of). unread: names of tensors that an engine holds in a layout that cannot be
    read back.
    """

    tensors: dict[str, str]
    unread: tuple[str, ...] = ()


# What a generator tells the learner of its base: where each tensor of the checkpoint lies, and how to map the memory.
#
# The driver carries it from one process to the other, hence no torch here. How memory is mapped is a transport's
# affair: rollout.shared_base on a card, rollout.shared_base on a CPU.

Transport = Literal["cuda_ipc", "shared_file"]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of the checkpoint as elements of one of the engine's parameters.

    Its element [i, j, ...] is element offset + i * strides[0] + j * strides[1] + ... of the parameter.
    """

    parameter: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix of the checkpoint that the engine holds in NF4 (model.base: nf4).

    Its view is the packed weights, two a byte: [elements / 2, 1] of uint8, without gaps. The scales of its blocks are a
    piece, [elements / block] of float32.

    Attributes:
        shape: of the matrix, [out, in].
        block: elements, in the order of its rows, that one scale belongs to.
        scales: the name of their piece.
    """

    shape: tuple[int, ...]
    block: int
    scales: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The memory of one of the engine's parameters, or of scales: [elements] of a torch type, without gaps.

    digest: of its content (rollout.shared_base). handle: what its transport maps it by.
    """

    dtype: str
    elements: int
    digest: str
    handle: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """A base model that may be mapped.

    Attributes:
        transport: how; it decides what the handles are.
        device: the card's UUID, or the machine; both processes must see the same.
        owner: the generator's process; no two have the same.
        pieces: by the engine's name of the parameter; of scales, by Quantised.scales.
        views: by the checkpoint's name of the tensor.
        refused: tensors of the checkpoint that are no view, and why.
        quantised: by the checkpoint's name, which of the views are in 4 bits; {} with a base in 16 or 32.
    """

    transport: Transport
    device: str
    owner: str
    pieces: dict[str, Piece]
    views: dict[str, View]
    refused: dict[str, str]
    quantised: dict[str, Quantised]
