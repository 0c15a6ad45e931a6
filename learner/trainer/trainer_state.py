"""The learner's part of a checkpoint: weights in the form in which they are published, and its state beside them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from cluster.files import Digest, digests_in
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
        OSError: it cannot be written; the message names the folder, the room that is left, and what to do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        export.save(policy, folder, path)
        for name, role in _trained(policy):
            role.save(folder / name, path)
        torch.save(state, folder / STATE_FILE)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's and safetensors' do not name the file
        raise not_written(folder, str(error)) from error
    return digests_in(folder)


def not_written(folder: Path, reason: str) -> OSError:
    """reason: in the words of whatever failed."""
    free = shutil.disk_usage(folder).free / 2**20
    return OSError(
        f"{folder}: the learner cannot write its part of a checkpoint, with {free:.0f} MiB free there: "
        f"{reason.splitlines()[0]}; mend that, and start the same command again: it goes on from the last checkpoint, "
        "if there is one"
    )


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
