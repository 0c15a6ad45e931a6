"""Converts the values of rollout.types to vLLM's and back (prompts, sampling parameters, adapters, outputs), and keeps
the adapter versions that an engine holds (AdapterWindow).

Arguments of vLLM are passed by keyword, since their positions differ between its versions.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.files import digest_of, writing
from rollout.data.weight_names import EXPERTS_PAIR
from rollout.types import Adapter, Completion, EngineError, Sampling, TeacherLogprobs, Weights
from rollout.weights import header_of

_WEIGHTS = "adapter_model.safetensors"
_CONFIG = "adapter_config.json"


@dataclass(slots=True)
class Resident:
    """A policy version that an engine holds, or is about to load.

    folder: the adapter's files; empty for whole weights. keys: names of the tensors. rank: the adapter's rank, 0 for
    weights. lora_id: vLLM's integer id, at least 1. run: number of the run whose policy it is, in an engine of several.
    users: how many running requests began with this version.
    """

    version: int
    digest: str
    folder: Path
    keys: frozenset[str]
    rank: int
    lora_id: int
    run: int = 0
    users: int = 0

    @property
    def label(self) -> str:
        """A text that no other version of any run has. It keeps them apart in the prefix cache."""
        return f"v{self.version}" if self.run == 0 else f"v{self.version} of run {self.run}"


class AdapterWindow:
    """The policy versions of one run that an engine holds: at most `capacity`, with their files and their users.

    run: its number among the `runs` runs of the engine.

    Neither the newest version nor one that is in use is evicted (but see replace). Each version has its own lora_id,
    which is never used twice. With capacity 1 all versions share one id: a newer adapter replaces the present one while
    requests run.

    stage() may run in any thread; all other methods belong to the engine's thread.
    """

    def __init__(self, capacity: int, run: int = 0, runs: int = 1) -> None:
        self._capacity, self._run, self._runs = capacity, run, runs
        self._residents: dict[int, Resident] = {}  # oldest first: versions only grow
        self._keys: frozenset[str] | None = None
        self._root = tempfile.TemporaryDirectory(prefix="gleaner-adapters-")

    @property
    def newest(self) -> Resident | None:
        """The version that new requests use; None before the first one."""
        return next(reversed(self._residents.values()), None)

    @property
    def residents(self) -> list[Resident]:
        """The versions in the window, the oldest first."""
        return list(self._residents.values())

    def stage(self, adapter: Adapter | Weights) -> Resident:
        """Writes the adapter to a folder of its own, in PEFT's format. The digest is made from the file's bytes.

        Whole weights are not written, since the engine loads them from memory and holds one version only.

        Raises AdapterCorrupt, EngineError if the payload is not safetensors, or OSError with the folder in it.
        """
        # Each version has a fresh folder: vLLM keeps a loaded file mapped, and rewriting it would kill the process.
        folder = Path(tempfile.mkdtemp(prefix=f"v{adapter.version}-", dir=self._root.name))
        try:
            digest = self._written(adapter, folder)
            keys = _keys_of(adapter)
            rank = 0 if isinstance(adapter, Weights) else int(adapter.config["r"])
        except BaseException:
            rmtree(folder)
            raise
        lora_id = 1 if self._capacity == 1 else adapter.version * self._runs + self._run + 1
        return Resident(adapter.version, digest, folder, keys, rank, lora_id, self._run)

    @staticmethod
    def _written(adapter: Adapter | Weights, folder: Path) -> str:
        """Writes an adapter's files to the folder. Returns the digest of the written file, or of weights in memory."""
        if isinstance(adapter, Weights):
            adapter.verify()
            return adapter.digest
        weights = folder / _WEIGHTS
        with writing(folder):
            weights.write_bytes(adapter.payload)
            (folder / _CONFIG).write_text(json.dumps(adapter.config))
        digest = str(digest_of(weights)["sha256"])
        if digest != adapter.digest:  # if they are equal, the payload is right as well and need not be hashed again
            adapter.verify()
        return digest

    def check(self, staged: Resident) -> None:
        """Raises EngineError for a version that is not newer than all others, or for other tensors than the first
        policy had."""
        newest = self.newest
        if newest is not None and staged.version <= newest.version:
            raise EngineError(
                f"adapter v{staged.version} (sha256 {staged.digest[:12]}…): its version must be above "
                f"v{newest.version}, the newest loaded (sha256 {newest.digest[:12]}…); give it a higher one"
            )
        if self._keys is not None and staged.keys != self._keys:
            missing, extra = sorted(self._keys - staged.keys), sorted(staged.keys - self._keys)
            raise EngineError(
                f"adapter v{staged.version}: its tensors must be those of the first adapter, since vLLM silently sets "
                f"absent modules to zero; {len(missing)} missing {missing[:3]}, {len(extra)} unknown {extra[:3]}. "
                "Train the same modules throughout a run, or restart the generators"
            )

    def evictable(self) -> Resident | None:
        """The oldest version that nobody uses and that is not the newest, or None."""
        newest = self.newest
        return next((r for r in self._residents.values() if r.users == 0 and r is not newest), None)

    def is_full(self) -> bool:
        return len(self._residents) >= self._capacity

    def add(self, staged: Resident) -> None:
        self._residents[staged.version] = staged
        self._keys = staged.keys or None  # Weights.unchanged has no tensors, and later weights have

    def replace(self, staged: Resident) -> None:
        """Makes the staged version the only one, even if requests still use another."""
        for resident in self.residents:
            self.drop(resident)
        self.add(staged)

    def drop(self, resident: Resident) -> None:
        """Forgets the version and deletes its files (a mapped file stays readable until vLLM lets go of it)."""
        self._residents.pop(resident.version, None)
        rmtree(resident.folder)

    def discard(self, staged: Resident) -> None:
        """Deletes the files of a version that was not added."""
        rmtree(staged.folder)

    def clear(self) -> None:
        """Deletes all files. Idempotent."""
        self._residents.clear()
        self._root.cleanup()


def _keys_of(adapter: Adapter | Weights) -> frozenset[str]:
    try:
        return frozenset(header_of(adapter.payload)[0])
    except (struct.error, ValueError, AttributeError) as error:
        raise EngineError(
            f"adapter v{adapter.version}: its payload must be safetensors, got {len(adapter.payload)} bytes starting "
            f"with {bytes(adapter.payload[:8])!r}; build it with safetensors.torch.save"
        ) from error


FORM = "gleaner_form"  # key in SamplingParams.extra_args that rollout.vllm.structured reads
_FINISH_REASONS = ("stop", "length")


def checked_prompt(token_ids: Sequence[int], max_tokens: int, max_model_len: int, vocab_size: int) -> list[int]:
    """The prompt as a list of int. Raises ValueError for a prompt that vLLM would refuse late, or whose completion
    vLLM would silently cut below max_tokens."""
    ids = [int(token) for token in token_ids]
    if not ids:
        raise ValueError("the prompt must hold at least 1 token, got 0")
    if len(ids) + max_tokens > max_model_len:
        raise ValueError(
            f"prompt and completion must fit in max_model_len={max_model_len} tokens, got {len(ids)} + {max_tokens}; "
            "raise max_model_len, or filter longer prompts"
        )
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(
            f"token ids must be in [0, {vocab_size}), got {min(ids)} to {max(ids)}; "
            "use the tokenizer of the engine's model"
        )
    return ids


def completion_params(
    sampling: Sampling, stop_ids: Sequence[int] = (), stop: Sequence[str] = (), form: str = ""
) -> Any:
    """vllm.SamplingParams that give all n completions at once when the last is done, with the sampled tokens' logprobs.

    stop_ids, stop, form: see EngineSettings; stop strings need an engine that has its tokenizer.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=sampling.n,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        # Without its tokenizer vLLM knows the end tokens of the model's configuration only.
        stop_token_ids=list(stop_ids),
        stop=list(stop),
        include_stop_str_in_output=True,  # otherwise vLLM leaves the end token out of the text that it compares
        logprobs=0,  # the sampled token's logprob and no other
        flat_logprobs=True,  # one list of floats instead of a dictionary and an object for each token
        detokenize=bool(stop),
        extra_args={FORM: form} if form else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def probe_params(top: int = 0) -> Any:
    """vllm.SamplingParams that ask for the logprobs of the prompt's tokens, which vLLM gives at temperature 1. top: and
    for those of so many likeliest tokens at each place."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=top,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def lora_request(adapter: Resident, *, load_inplace: bool = False) -> Any:
    """vllm.LoRARequest of an adapter. Each version has its own name, since the prefix cache is keyed by the name.

    load_inplace: whether vLLM reads the files again though the id is loaded. It must be False in a request, where vLLM
    would do so at every step.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest(
        lora_name=f"policy {adapter.label}",
        lora_int_id=adapter.lora_id,
        lora_path=str(adapter.folder),
        load_inplace=load_inplace,
        is_3d_lora_weight=any(EXPERTS_PAIR.search(key) for key in adapter.keys),
    )


def read_completions(output: Any, version: int, *, experts: bool = False) -> list[Completion]:
    """The G completions of a finished vllm.RequestOutput, in order; every token is of policy version `version`.
    experts: whether they have to tell to which experts their tokens went.

    Raises EngineError if vLLM failed one of them.
    """
    parts = sorted(output.outputs, key=lambda part: part.index)
    prompt = len(output.prompt_token_ids) if experts else None
    return [_completion(part, np.full(len(part.token_ids), version, np.int32), prompt) for part in parts]


def read_continued(output: Any, _began_with: int, *, experts: bool = False) -> list[Completion]:
    """The G completions of a finished vllm.RequestOutput; vLLM's spans say which version sampled which tokens."""
    parts = sorted(output.outputs, key=lambda part: part.index)
    prompt = len(output.prompt_token_ids) if experts else None
    return [_completion(part, _versions(part.weight_versions), prompt) for part in parts]


def _versions(spans: Sequence[Any]) -> NDArray[np.int32]:
    """[T] the policy version of each token. Each span has a version and token indices [start, end)."""
    labels = np.array([int(span.version) for span in spans], np.int32)
    return labels.repeat(np.array([span.end - span.start for span in spans], np.int64))


def _completion(part: Any, versions: NDArray[np.int32], prompt: int | None) -> Completion:
    """prompt: tokens of the prompt, where the experts of all tokens have to be told; None: they are not."""
    count = len(part.token_ids)
    if part.finish_reason not in _FINISH_REASONS:
        raise EngineError(
            f"vLLM must finish a completion with one of {', '.join(_FINISH_REASONS)}, got {part.finish_reason!r} "
            f"after {count} tokens; ask again"
        )
    tokens = np.array(part.token_ids, np.int32)
    experts = None if prompt is None else _experts(part.routed_experts, prompt + count - 1)
    return Completion(tokens, _flat(part.logprobs, count), part.finish_reason, versions, experts)


def _experts(routed: Any, count: int) -> NDArray[np.int16]:
    """[count, layers, k]: of the tokens that were computed. Raises EngineError unless there are `count` of them."""
    routed = () if routed is None else routed
    if len(routed) != count:
        raise EngineError(f"vLLM must tell the experts of {count} tokens, got those of {len(routed)}; ask again")
    return np.asarray(routed, np.int16)


def read_probe(output: Any, _version: int) -> NDArray[np.float32]:
    """[len - 1] float32, nats: logprobs of a probe's tokens but the first, for which vLLM has none."""
    return _flat(output.prompt_logprobs, len(output.prompt_token_ids) - 1)


def read_prompt_logprobs(output: Any, _version: int, *, prompt: int, top: int) -> TeacherLogprobs:
    """The logprobs of the tokens behind the first `prompt` ones, and of the `top` likeliest tokens at each place."""
    count, width = len(output.prompt_token_ids) - 1, 1 + top  # vLLM gives the token's own logprob first
    logprobs = output.prompt_logprobs
    values = _flat(logprobs, count * width).reshape(count, width)[prompt - 1 :]
    ids = np.array(logprobs.token_ids, np.int32).reshape(count, width)[prompt - 1 :]
    return TeacherLogprobs(values[:, 0].copy(), ids[:, 1:].copy(), values[:, 1:].copy())


def _flat(logprobs: Any, count: int) -> NDArray[np.float32]:
    """[count] float32: the values of vLLM's FlatLogprobs. Raises EngineError unless there are `count`."""
    values = np.array(logprobs.logprobs, np.float32)
    if len(values) != count:
        raise EngineError(f"vLLM must give {count} logprobs, got {len(values)}; ask again")
    return values
