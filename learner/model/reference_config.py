"""Checks model.reference of a run that trains the whole model: it must be a whole model of the same architecture.

Only configurations are read, no weights.
"""

from pathlib import Path

from learner.model.adapter_config import CONFIG_FILE
from rollout.data.hub import split

# Settings of a transformers config that do not change what the learner computes. Dropout and the ids of special tokens
# do not either; they are recognised by their names below.
FREE = {"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache", "initializer_range"}


class ReferenceConfigError(ValueError):
    """model.reference cannot be the reference of model.path."""


def check_reference(reference: str, path: str) -> None:
    """Raises ReferenceConfigError if `reference` is no whole model, or computes otherwise than that of `path`."""
    from transformers import AutoConfig  # here: slow to import, and few runs use it

    if (Path(reference) / CONFIG_FILE).exists():
        raise ReferenceConfigError(
            f"model.reference: must be a whole model, as what is trained is (learner.mode=full), {reference} is an "
            "adapter; give a model's folder, or null for what training starts from"
        )
    try:
        theirs = AutoConfig.from_pretrained(reference, trust_remote_code=False).to_dict()
    except (OSError, ValueError) as error:
        raise ReferenceConfigError(
            f"model.reference: must be a model's folder or hub name, got {reference} ({str(error).splitlines()[0]}); "
            "give another, or null for what training starts from"
        ) from None
    model, revision = split(path)
    ours = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=False).to_dict()
    for name in sorted((theirs.keys() | ours.keys()) - FREE):
        if theirs.get(name) != ours.get(name) and "drop" not in name and not name.endswith("_token_id"):
            raise ReferenceConfigError(
                f"model.reference: must be a whole model of the architecture of model.path, {name} of {reference} is "
                f"{theirs.get(name)!r}, not {ours.get(name)!r}; give another, or null for what training starts from"
            )
