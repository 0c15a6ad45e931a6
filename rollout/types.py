"""The values that rollout worker, generator, driver and learner exchange: samplings and completions, policies and their
digests, and the description of a base model that another process may map into its memory.

The driver imports this module, so it needs no torch. Letters: P prompt tokens, T completion tokens, G completions per
prompt.
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

# Seeds of the sampling. They depend on the place in the run only, not on the worker that samples nor on the time.


def seed_of(*parts: object) -> int:
    """A hash of the parts in 47 bits, so many that the seeds seed + j of two groups do not meet in practice."""
    return int.from_bytes(hashlib.sha256("-".join(map(str, parts)).encode()).digest()[:6]) >> 1


def group_seed(run_seed: int, position: int, attempt: int) -> int:
    """The sampling seed of the group at a position of the stream, for one attempt."""
    return seed_of(run_seed, position, attempt)


# Stop tokens and stop strings, which end a completion before its greatest length.


def split(tokenizer: Any, strings: Sequence[str]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Divides stop strings into (ids of the strings that are a special token of the tokenizer, the other strings).

    Stop strings are looked for in text decoded without special tokens, so a special token can end a completion by its
    id only. Raises WrongInput for a string in which a special token stands beside other text.
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


# vLLM raises any temperature in (0, 0.01) to 0.01 and only logs that. The recorded logprobs would then belong to
# another temperature than the learner assumes.
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
        logprobs: [T] float32, nats, at the temperature of the sampling (at temperature 1 for greedy sampling), under
            the whole distribution even where top_p, top_k or min_p left out a part of it.
        finish_reason: "stop" (an end token or a stop string) or "length" (max_tokens reached).
        versions: [T] int32, policy version that sampled each token. All are equal, unless in_flight is "continue":
            then they never fall from one token to the next.
        experts: [P + T - 1, layers, k] int16, the experts that the router of each layer chose for each token that was
            computed, the prompt's first; in a layer without experts any number. None: not recorded (EngineSettings).
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    finish_reason: str
    versions: NDArray[np.int32]
    experts: NDArray[np.int16] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TeacherLogprobs:
    """A teacher's logprobs of one completion, given its prompt, at temperature 1. Compared by identity, as Completion.

    Attributes:
        logprobs: [T] float32, nats, of the completion's tokens.
        top_ids, top_logprobs: [T, k] int32 and float32, the k tokens that it finds likeliest at each place, the
            likeliest first; k may be 0.
    """

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample the completions of one prompt.

    Attributes:
        n: completions per prompt (G).
        max_tokens: tokens per completion, the end token included.
        temperature: 0 is greedy (then n must be 1), otherwise at least 0.01.
        seed: completion j is sampled with seed + j, so seeds of different prompts must differ by at least n,
            or two prompts share random streams. None: drawn from the engine's own seed.
        top_p, top_k, min_p: which tokens may be sampled, with vLLM's meaning; 1, 0 and 0 allow all. Other values need
            an engine with EngineSettings.truncates, and temperature 1 or 0.

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
        """Whether top_p, top_k or min_p exclude tokens from the sampling."""
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
    """Names a policy: its version, and the digest of its Adapter or Weights."""

    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter on its way from the learner to the generators.

    Attributes:
        version: policy version, at least 0; each policy has a higher one than the policy before.
        digest: sha256 of payload, hex.
        payload: safetensors bytes with PEFT's names (base_model.model.….lora_A.weight).
        config: the content of adapter_config.json; must be JSON.
    """

    version: int
    digest: str
    payload: bytes | memoryview
    config: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles with the payload out of band (PEP 574): Ray keeps it in shared memory, where readers map it."""
        return _arrived_adapter, (self.version, self.digest, PickleBuffer(self.payload), self.config)

    @classmethod
    def build(cls, version: int, payload: bytes | memoryview, config: dict[str, Any]) -> Adapter:
        """An Adapter with the digest of its payload. Raises ValueError for a negative version."""
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
    """Weights of a model on their way from the learner to the generators.

    They are all weights (learner.mode: full), those that the adapter changes, with the adapter merged into them
    (learner.push: merged), or none, which stands for the model as it is in its folder.

    Attributes:
        version: policy version, as in Adapter.
        digest: digest_of_weights of the payload.
        payload: safetensors bytes with the names of the checkpoint, without weights that are tied to another. Layers
            that engines fuse (q, k and v; gate and up) come together or not at all.
        place: where other processes of this machine can map the payload; None if they cannot.
    """

    version: int
    digest: str
    payload: bytes | memoryview
    place: WeightsInFile | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as an Adapter does, without `place`."""
        return _arrived_weights, (self.version, self.digest, PickleBuffer(self.payload))

    @classmethod
    def build(cls, version: int, payload: bytes | memoryview) -> Weights:
        """Weights with the digest of their payload."""
        return cls(version=version, digest=digest_of_weights(payload), payload=payload)

    @classmethod
    def unchanged(cls, version: int) -> Weights:
        """The model as it is in its folder."""
        return cls.build(version, (2).to_bytes(8, "little") + b"{}")  # safetensors without a tensor

    @property
    def policy_id(self) -> PolicyId:
        return PolicyId(self.version, self.digest)

    def verify(self) -> None:
        """Raises AdapterCorrupt if the payload is not the one that the digest was computed from."""
        _verify("weights", self, digest_of_weights(self.payload))


class WeightsInFile(NamedTuple):
    """The place of whole weights in a file in memory, which processes of the learner's machine map (rollout.weights).

    version, digest: those of the Weights. machine: cluster.machine.name() in the learner's process. path, inode: of the
    file. offset: byte of the file at which the place of this policy begins. size: bytes of the payload.
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


SentPolicy = Adapter | Weights | WeightsInFile  # a policy in the form in which the learner sends it to the generators


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
    """The payload's sha256 as a hex string."""
    return hashlib.sha256(payload).hexdigest()


def digest_of_weights(payload: bytes | memoryview) -> str:
    """The payload's BLAKE3 as a hex string, computed on all cores. Whole weights are gigabytes, and sha256 would take
    a second of one core for each gigabyte."""
    return blake3(payload, max_threads=blake3.AUTO).hexdigest()


class Held(NamedTuple):
    """The digests of the tensors with which one process computes the newest policy.

    tensors: name -> sha256 hex (rollout.weights.digest_of_tensor) of an adapter's tensor, or of the part of a weight
    that rollout.weights.read_of reads. unread: names of tensors whose layout in the engine cannot be read back.
    """

    tensors: dict[str, str]
    unread: tuple[str, ...] = ()


# A Manifest tells the learner where each tensor of the checkpoint lies in the memory of a generator's engine.
# rollout.shared_base maps that memory, on a card by CUDA IPC and on a CPU by a shared file.

Transport = Literal["cuda_ipc", "shared_file"]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of the checkpoint as a strided view of one of the engine's parameters.

    Element [i, j, ...] of the tensor is element offset + i * strides[0] + j * strides[1] + ... of the parameter.
    """

    parameter: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix of the checkpoint that the engine holds in NF4 (model.base: nf4).

    The matrix's View is of the packed weights, two in a byte: [elements / 2, 1] of uint8, without gaps. The scales of
    the matrix's blocks are a Piece of their own, [elements / block] of float32.

    Attributes:
        shape: shape of the matrix, [out, in].
        block: how many elements, in row-major order, share a scale.
        scales: key of the scales in Manifest.pieces.
    """

    shape: tuple[int, ...]
    block: int
    scales: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The memory of one of the engine's parameters, or of NF4 scales: [elements] of a torch dtype, without gaps.

    digest: digest of the content (rollout.shared_base). handle: bytes by which the transport maps the memory.
    """

    dtype: str
    elements: int
    digest: str
    handle: bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """A generator's base model, described so that the learner can map it.

    Attributes:
        transport: how the memory is mapped, which decides what the handles are.
        device: UUID of the card, or name of the machine, which must be the same for both processes.
        owner: identity of the generator's process; no two processes have the same.
        pieces: the engine's name of a parameter, or Quantised.scales -> its memory.
        views: the checkpoint's name of a tensor -> where it lies.
        refused: the checkpoint's name of a tensor that cannot be a view -> the reason.
        quantised: the checkpoint's name of a matrix in 4 bits -> its format; {} with a base in 16 or 32 bits.
    """

    transport: Transport
    device: str
    owner: str
    pieces: dict[str, Piece]
    views: dict[str, View]
    refused: dict[str, str]
    quantised: dict[str, Quantised]
