"""The learner's part of a checkpoint: weights in the form in which they are published, and its state beside them."""

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
SHARDS = "shards"  # folder of a checkpoint of a model in shards
POLICY = ""  # no name of a role


def write(folder: Path, policy: Policy, path: str, state: dict[str, Any]) -> dict[str, Digest]:
    """The policy, in a folder of its own each further role that is trained, and a state of tensors and plain values;
    `path` is the base model's. The folder is made.

    Returns what was written, by path in the folder.

    Raises:
        WriteFailed: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        export.save(policy, folder, path)
        for name, role in _trained(policy):
            role.save(folder / name, path)
        save(state, folder / STATE_FILE)
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's and safetensors' do not name the file
        raise write_failed(folder, error, _bytes(policy, state)) from error
    return digests_in(folder)


def save(state: dict[str, Any], file: Path) -> None:
    """As torch.save, which of a path would tell nothing but that a position is unexpected where the disk is full."""
    try:
        with file.open("wb") as stream:
            torch.save(state, stream)
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError) as error:
        raise write_failed(file, error) from error


def _bytes(policy: Policy, state: dict[str, Any]) -> int:
    """About what `write` writes."""
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
    """Sets the weights of policy and trained roles, and returns the state. Raises as learner.model.export.load_masters
    does."""
    state: dict[str, Any] = torch.load(folder / STATE_FILE, weights_only=True, map_location="cpu")
    export.load_masters(policy, folder)
    for name, role in _trained(policy):
        role.load(folder / name)
    return state


def weights_of(policy: Policy) -> dict[str, dict[str, Tensor]]:
    """Copies in main memory of what `set_weights` needs: role -> name -> weight, the policy's role first."""
    own = {POLICY: policy.masters} | {name: _masters(role).named for name, role in _trained(policy)}
    return {
        role: {name: weight.detach().to("cpu", copy=True) for name, weight in named.items()}
        for role, named in own.items()
    }


def set_weights(policy: Policy, weights: dict[str, dict[str, Tensor]]) -> None:
    """Sets those of policy and trained roles. Raises ValueError if they are another model's."""
    policy.load(weights[POLICY])
    for name, role in _trained(policy):
        _masters(role).load(weights[name])


def _masters(role: ScoredAdapter) -> Masters:
    assert role.masters is not None, "a role that is trained has masters"
    return role.masters


def _trained(policy: Policy) -> list[tuple[str, ScoredAdapter]]:
    return [(name, role) for name, role in policy.scored.items() if role.masters is not None]


# The learner's part of a checkpoint where the trained weights are in shards (learner.model.sharded_base): torch's
# distributed checkpoint. Each rank writes its rows of weights and moments, and reads those that are its own when the
# run goes on, on however many ranks. The whole model for users is gathered weight by weight.
#
# 8-bit states are not rows: their blocks begin with each rank's own rows. So they go into a file of each rank, and as
# many ranks must read them again (learner.driver.identity sees to it).

MOMENTS = ("exp_avg", "exp_avg_sq")  # of torch's AdamW
EACH = {*MOMENTS, "step"}  # what its states are; bitsandbytes' are others


class DividedState:
    """All ranks call the methods together; one process reads as well, without others."""

    def __init__(self, policy: Policy, optimizers: Sequence[torch.optim.Optimizer], peers: Peers) -> None:
        self._policy, self._trained, self._peers = policy, policy.trained, peers
        names = {id(weight): name for name, weight in policy.masters.items()}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._names = [names[id(weight)] for group in groups for weight in group["params"]]  # as they are numbered

    def write(self, folder: Path, path: str, state: dict[str, Any]) -> dict[str, Digest]:
        """As `write`; each rank tells of what it wrote itself."""
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
        """Files that this rank has written."""
        own = [folder / _file_of(self._peers.rank), *(folder / SHARDS).glob(f"shard-{self._peers.rank + 1:05d}-*")]
        model = (folder / MODEL).rglob("*") if self._peers.rank == 0 else ()
        return [file.relative_to(folder).as_posix() for file in (*own, *model) if file.is_file()]

    def read(self, folder: Path) -> dict[str, Any]:
        """Sets this rank's rows of the weights, and returns its state. From a checkpoint of one process, too.

        ValueError: 8-bit states of another number of ranks. OSError: it cannot be read.
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
        with warnings.catch_warnings():  # that one process alone reads it
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
        """The moments of a weight."""
        name = self._names[number]
        return {f"{kind}/{name}": self._trained.as_shards(name, states[kind]) for kind in MOMENTS if kind in states}

    @contextmanager
    def _together(self, folder: Path) -> Iterator[None]:
        """An OSError of one rank in this block is one of all behind it: no rank waits for one that has given up."""
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
        """The whole weights, for a rank that writes them. The others gather with it, and it gathers to the end if it
        fails."""
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
    """Of the optimizer, by the number of the weight."""
    states: dict[int, dict[str, Tensor]] = state["updater"]["optimizer"]["state"]
    return states


def _in_blocks(state: dict[str, Any]) -> bool:
    return any(own.keys() - EACH for own in _states(state).values())


def _in_files(tensors: dict[str, Tensor], ranks: int) -> dict[str, int]:
    """The number of the file in which each is written: a rank holds what it writes of one file twice."""
    ends = accumulate(tensor.nbytes for tensor in tensors.values())
    return {name: 1 + end // (ranks * FILE_BYTES) for name, end in zip(tensors, ends, strict=True)}


def _file_of(rank: int | str) -> str:
    return STATE_FILE if rank == 0 else f"rank-{rank}-{STATE_FILE}"


def _first(error: CheckpointException) -> BaseException:
    """Of the first rank that failed."""
    first, _ = next(iter(error.failures.values()))
    return first


def _reason(error: CheckpointException) -> str:
    """In that one's own words."""
    first = _first(error)
    return f"{type(first).__name__}: {first}"


def _load(file: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    return state
