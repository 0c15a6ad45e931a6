"""The learner's part of a checkpoint: weights in the form in which they are published, and its state beside them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from cluster.files import Digest, digests_in
from learner.model import export
from learner.model.policy import Policy

STATE_FILE = "trainer.pt"


def write(folder: Path, policy: Policy, path: str, state: dict[str, Any]) -> dict[str, Digest]:
    """The policy and a state of tensors and plain values; `path` is the base model's. The folder is made.

    Returns what was written, by path in the folder.

    Raises:
        OSError: it cannot be written; the message names the folder and the room that is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        export.save(policy, folder, path)
        torch.save(state, folder / STATE_FILE)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch's and safetensors' do not name the file
        free = shutil.disk_usage(folder).free / 2**20
        raise OSError(
            f"{folder}: the learner cannot write its part of a checkpoint, with {free:.0f} MiB free there: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return digests_in(folder)


def read(folder: Path, policy: Policy) -> dict[str, Any]:
    """Sets the policy's weights and returns the state. Raises as learner.model.export.load_masters does."""
    state: dict[str, Any] = torch.load(folder / STATE_FILE, weights_only=True, map_location="cpu")
    export.load_masters(policy, folder)
    return state
