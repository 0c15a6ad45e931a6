"""The learner's part of a checkpoint where the trained weights are in shards (learner.model.sharded_base): torch's
distributed checkpoint. Each rank writes its rows of weights and moments, and reads those that are its own when the run
goes on, on however many ranks. The whole model for users is gathered weight by weight.

8-bit states are not rows: their blocks begin with each rank's own rows. So they go into a file of each rank, and as
many ranks must read them again (learner.driver.identity sees to it).
"""

import warnings
from collections.abc import Iterator, Sequence
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
from torch.distributed.checkpoint.state_dict_saver import save

from cluster.files import Digest, WriteFailed, digest_of, write_failed
from cluster.memory.sharded import FILE_BYTES
from learner.model.adapter_config import MODEL
from learner.model.export import export_model
from learner.model.policy import Policy
from learner.trainer.peers import Peers
from learner.trainer.trainer_state import SHARDS, STATE_FILE
from learner.trainer.trainer_state import save as save_state
from rollout.data.weight_files import WEIGHTS_FILE
from rollout.safetensors_stream import Source

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
        """As learner.trainer.trainer_state.write; each rank tells of what it wrote itself."""
        first, states, tensors = self._peers.rank == 0, _states(state), self._weights()
        for number, own in states.items():
            tensors |= self._rows(number, own)
            states[number] = {kind: value for kind, value in own.items() if kind not in MOMENTS}
        with self._together(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if first or _in_blocks(state):
                save_state(state, folder / _file_of(self._peers.rank))
        with self._together(folder):
            files = _in_files(tensors, self._peers.count)
            writer = HuggingFaceStorageWriter(str(folder / SHARDS), files, save_distributed=True)
            save(tensors, storage_writer=writer)
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
