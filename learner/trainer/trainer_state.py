"""The learner's part of a checkpoint: weights in the form in which they are published, and its state beside them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from cluster.files import Digest, digests_in, write_failed
from learner.model import export
from learner.model.masters import Masters
from learner.model.policy import Policy
from learner.model.roles import ScoredAdapter

STATE_FILE = "trainer.pt"
SHARDS = "shards"  # folder of a checkpoint of a model in shards (learner.trainer.divided_state)
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
