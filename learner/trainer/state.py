"""Writes and reads the learner's part of a checkpoint: the weights in a format that users can load, and the state of
the trainer (optimizers, random number generators, version). `write` and `read` serve a learner whose weights are whole
in one process, DividedState one whose trained weights are sharded over ranks.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from cluster.files import Digest, WriteFailed, digest_of, digests_in, write_failed
from cluster.memory.learner import FILE_BYTES
from learner.model import export
from learner.model.adapter_config import MODEL
from learner.model.export import export_model
from learner.model.masters import Masters
from learner.model.policy import Policy
from learner.model.roles import ScoredAdapter
from learner.trainer.optimizer import Peers
from rollout.data.model_files import WEIGHTS_FILE
from rollout.weights import Source

STATE_FILE = "trainer.pt"
SHARDS = "shards"  # folder in the checkpoint with sharded weights and moments
POLICY = ""  # stands for the policy among the names of roles, none of which is empty


def write(folder: Path, policy: Policy, path: str, state: dict[str, Any]) -> dict[str, Digest]:
    """Writes a checkpoint into `folder`, which is created: the policy, each other trained role in a folder named after
    it, and the state.

    Returns the digests of the files, by path in the folder.

    Args:
        path: name or folder of the base model, which goes into the adapter's configuration.
        state: tensors and plain values.

    Raises:
        WriteFailed: the checkpoint cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        export.save(policy, folder, path)
        for name, role in _trained(policy):
            role.save(folder / name, path)
        save(state, folder / STATE_FILE)
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:  # errors of torch and safetensors do not name the file
        raise write_failed(folder, error, _bytes(policy, state)) from error
    return digests_in(folder)


def save(state: dict[str, Any], file: Path) -> None:
    """Does what torch.save does, and raises WriteFailed. The file is opened here since torch.save, given a path,
    reports a full disk only as an unexpected position."""
    try:
        with file.open("wb") as stream:
            torch.save(state, stream)
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError) as error:
        raise write_failed(file, error) from error


def _bytes(policy: Policy, state: dict[str, Any]) -> int:
    """Returns about how many bytes `write` writes."""
    weights = [
        *policy.masters.values(),
        *(weight for _, role in _trained(policy) for weight in _masters(role).named.values()),
    ]
    whole = 0 if policy.peft_config is not None else sum(weight.numel() for weight in weights) * policy.dtype.itemsize
    return whole + sum(tensor.nbytes for tensor in (*weights, *_tensors(state)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one)


def read(folder: Path, policy: Policy) -> dict[str, Any]:
    """Sets the weights of the policy and of other trained roles from a checkpoint, and returns its state. Raises what
    learner.model.export.load_masters raises."""
    state: dict[str, Any] = torch.load(folder / STATE_FILE, weights_only=True, map_location="cpu")
    export.load_masters(policy, folder)
    for name, role in _trained(policy):
        role.load(folder / name)
    return state


def weights_of(policy: Policy) -> dict[str, dict[str, Tensor]]:
    """Returns copies in main memory of all trained weights, for `set_weights`: role -> name -> weight, the policy's
    role first."""
    own = {POLICY: policy.masters} | {name: _masters(role).named for name, role in _trained(policy)}
    return {
        role: {name: weight.detach().to("cpu", copy=True) for name, weight in named.items()}
        for role, named in own.items()
    }


def set_weights(policy: Policy, weights: dict[str, dict[str, Tensor]]) -> None:
    """Sets the weights of the policy and of other trained roles. Raises ValueError if they are another model's."""
    policy.load(weights[POLICY])
    for name, role in _trained(policy):
        _masters(role).load(weights[name])


def _masters(role: ScoredAdapter) -> Masters:
    assert role.masters is not None, "a role that is trained has masters"
    return role.masters


def _trained(policy: Policy) -> list[tuple[str, ScoredAdapter]]:
    return [(name, role) for name, role in policy.scored.items() if role.masters is not None]


# Checkpoints of sharded weights.

MOMENTS = ("exp_avg", "exp_avg_sq")  # names of the moments in torch's AdamW
EACH = {*MOMENTS, "step"}  # names of all states of a weight in torch's AdamW; bitsandbytes has other names


class DividedState:
    """Writes and reads a checkpoint whose trained weights are sharded (learner.model.bases.sharded).

    All ranks call the methods together; `read` also works in a single process. Weights and moments are in the format of
    torch's distributed checkpoint: each rank writes its rows, and reads its rows again, for any number of ranks. The
    whole model for users is gathered weight by weight.

    8-bit optimizer states are blocks that begin with the first row of a rank, so they cannot be divided anew. They are
    in one file per rank, and the same number of ranks must read them (learner.driver.identity checks it).
    """

    def __init__(self, policy: Policy, optimizers: Sequence[torch.optim.Optimizer], peers: Peers) -> None:
        self._policy, self._trained, self._peers = policy, policy.trained, peers
        names = {id(weight): name for name, weight in policy.masters.items()}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        # The names of the weights in the order of the optimizer's numbers.
        self._names = [names[id(weight)] for group in groups for weight in group["params"]]

    def write(self, folder: Path, path: str, state: dict[str, Any]) -> dict[str, Digest]:
        """Does what the function `write` does; each rank returns the digests of the files that it wrote."""
        first, states, tensors = self._peers.rank == 0, _states(state), self._weights()
        for number, own in states.items():
            tensors |= self._rows(number, own)
            states[number] = {kind: value for kind, value in own.items() if kind not in MOMENTS}
        with self._together(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if first or _in_blocks(state):
                save(state, folder / _file_of(self._peers.rank))
        with self._together(folder):
            files = _in_files(tensors, self._peers.count)
            writer = HuggingFaceStorageWriter(str(folder / SHARDS), files, save_distributed=True)
            save_tensors(tensors, storage_writer=writer)
        with self._together(folder), self._all_gathered() as sources:
            if first:
                export_model(self._policy, sources, folder / MODEL, path)
        return {name: digest_of(folder / name) for name in self._own(folder)}

    def _own(self, folder: Path) -> list[str]:
        """Returns the files that this rank has written, by path in the folder."""
        own = [folder / _file_of(self._peers.rank), *(folder / SHARDS).glob(f"shard-{self._peers.rank + 1:05d}-*")]
        model = (folder / MODEL).rglob("*") if self._peers.rank == 0 else ()
        return [file.relative_to(folder).as_posix() for file in (*own, *model) if file.is_file()]

    def read(self, folder: Path) -> dict[str, Any]:
        """Sets this rank's rows of the weights, and returns its state. It also reads a checkpoint of whole weights.

        Raises ValueError for 8-bit states of another number of ranks, and OSError if a file cannot be read.
        """
        state = _load(folder / _file_of(0))
        if not (folder / SHARDS).is_dir():
            return self._cut(folder, state)
        if _in_blocks(state):
            then = 1 + len([*folder.glob(_file_of("*"))])
            if then != self._peers.count:
                raise ValueError(
                    f"cluster.learners: must be {then}, as when {folder} was written, got {self._peers.count}: the "
                    "states of an 8-bit optimizer cannot be divided anew"
                )
            state = _load(folder / _file_of(self._peers.rank))
        tensors = self._weights()
        for number, own in _states(state).items():
            if not _in_blocks(state):
                own |= {kind: torch.empty_like(self._policy.masters[self._names[number]]) for kind in MOMENTS}
            tensors |= self._rows(number, own)
        with warnings.catch_warnings():  # torch warns if a single process reads
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            try:
                load(tensors, storage_reader=HuggingFaceStorageReader(str(folder / SHARDS)))
            except CheckpointException as error:
                raise OSError(f"{folder / SHARDS} cannot be read: {_reason(error)}") from error
        self._policy.sync()
        return state

    def _cut(self, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
        with safe_open(folder / WEIGHTS_FILE, framework="pt") as file, torch.no_grad():
            for name, master in self._policy.masters.items():
                master.copy_(self._trained.own_part(name, file.get_tensor(name)))
        self._policy.sync()
        for number, own in _states(state).items():
            own |= {
                kind: self._trained.own_part(self._names[number], own[kind]).clone() for kind in MOMENTS if kind in own
            }
        return state

    def _weights(self) -> dict[str, Tensor]:
        return {f"weight/{name}": self._trained.as_shards(name, rows) for name, rows in self._policy.masters.items()}

    def _rows(self, number: int, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the moments of a weight as shards, by their names in the checkpoint."""
        name = self._names[number]
        return {f"{kind}/{name}": self._trained.as_shards(name, states[kind]) for kind in MOMENTS if kind in states}

    @contextmanager
    def _together(self, folder: Path) -> Iterator[None]:
        """Raises WriteFailed on all ranks after the block if it failed on one, so that no rank waits for one that has
        given up."""
        failed: WriteFailed | None = None
        try:
            yield
        except CheckpointException as error:
            failed = write_failed(folder, _first(error))
        except torch.OutOfMemoryError:
            raise
        except (OSError, RuntimeError, SafetensorError) as error:
            failed = write_failed(folder, error)
        told = None if failed is None else (failed.errno, failed.strerror, failed.filename)
        if others := [one for one in self._peers.gather(told) if one]:
            raise write_failed(folder, failed or WriteFailed(*others[0]))

    @contextmanager
    def _all_gathered(self) -> Iterator[dict[str, Source]]:
        """Yields the whole weights for the rank that writes them; each is gathered when it is read. The other ranks
        take part in the gathering, and a rank that fails gathers the remaining weights, so that no rank waits for
        it."""
        left = self._trained.sources()

        def taken(name: str, source: Source, place: Tensor) -> None:
            del left[name]
            source.write(place)

        try:
            yield {name: Source(source.shape, partial(taken, name, source)) for name, source in left.items()}
        finally:
            for name in left:
                self._trained.whole(name)


def _states(state: dict[str, Any]) -> dict[int, dict[str, Tensor]]:
    """Returns the optimizer's states by the number of the weight."""
    states: dict[int, dict[str, Tensor]] = state["updater"]["optimizer"]["state"]
    return states


def _in_blocks(state: dict[str, Any]) -> bool:
    return any(own.keys() - EACH for own in _states(state).values())


def _in_files(tensors: dict[str, Tensor], ranks: int) -> dict[str, int]:
    """Returns the number of the file for each tensor. Files are small, since a rank holds its part of a file twice."""
    ends = accumulate(tensor.nbytes for tensor in tensors.values())
    return {name: 1 + end // (ranks * FILE_BYTES) for name, end in zip(tensors, ends, strict=True)}


def _file_of(rank: int | str) -> str:
    return STATE_FILE if rank == 0 else f"rank-{rank}-{STATE_FILE}"


def _first(error: CheckpointException) -> BaseException:
    """Returns the error of the first rank that failed."""
    first, _ = next(iter(error.failures.values()))
    return first


def _reason(error: CheckpointException) -> str:
    """Returns type and message of that error."""
    first = _first(error)
    return f"{type(first).__name__}: {first}"


def _load(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    return state
