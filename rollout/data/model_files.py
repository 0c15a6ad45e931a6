"""Tokenizer and JSON files of a model, from a folder or from the hub."""

from pathlib import Path
from typing import Any

from cluster.reading import MIB, Unreadable, read_mapping, read_text
from rollout.data.chat_error import ChatError
from rollout.data.hub import split

CONFIG = "config.json"  # which every model has
LONGEST_TEMPLATE = MIB  # bytes
# Tokenizers that AutoTokenizer would load with this very class. Named here because the class alone does not import
# torch and AutoTokenizer does: 2 s instead of 6 s, and 300 MB less in every process that only needs the words.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(path: str) -> Any:
    """The tokenizer of the model at `path`, a folder, a hub name or name@revision. Raises ChatError."""
    name, revision = split(path)
    try:
        if read_json(path, "tokenizer_config.json").get("tokenizer_class") in PLAIN_CLASSES:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except ChatError:
        raise
    except Exception as error:  # the tokenizers library has no exceptions of its own
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        if "custom code" in reason:
            raise ChatError(
                f"model.path: the tokenizer of {path} needs Python code that comes with it, and such code is never "
                "run; save it as a tokenizer.json, or give another model"
            ) from error
        raise ChatError(f"model.path: {path} must hold a tokenizer that transformers can load: {reason}") from error


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # a name that is too long
        return False


def hub_file(model: str, file: str) -> Path | None:
    """A file of a hub's model (`name` or `name@revision`), downloaded where it is not in the cache; None where it has
    no such file. Offline, what a cached commit does not have counts as not there. Raises ChatError."""
    # Not above: 50 ms, and each process reads the JSON of a folder first.
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RevisionNotFoundError,
    )

    name, revision = split(model)
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE and isinstance(try_to_load_from_cache(name, CONFIG, revision=revision), str):
            return None
        raise ChatError(_not_cached(name, revision)) from error
    except EntryNotFoundError:
        return None
    except RevisionNotFoundError as error:
        raise ChatError(
            f"model.revision: must be a branch, tag or commit of the hub's {name}, which has no {revision}; choose one "
            "on the model's page (Files and versions), or leave it out for the newest"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise ChatError(
            f"model.path: must be a folder or a hub model that you may read, got {name[:100]}: "
            f"{str(error).strip().splitlines()[0][:200]}; check the name, or log in with: hf auth login"
        ) from error


def _not_cached(name: str, revision: str | None) -> str:
    if revision is None:
        return (
            f"model.path: {name} is neither a folder here nor a hub model in the cache, and the hub cannot be "
            "reached; download it first (hf download), or give a folder"
        )
    return (
        f"model.revision: must be one of {name} that is in the cache, since the hub cannot be reached, got {revision}; "
        f"download it first (hf download {name} --revision {revision}), or give one that is there"
    )


def read_json(path: str, name: str) -> dict[str, Any]:
    """One JSON file of a model folder or of a hub model (`name` or `name@revision`); empty where the model has no such
    file. Raises ChatError."""
    hub_name, _ = split(path)
    if _is_folder(path):
        file = Path(path) / name
    elif Path(path).is_absolute() or path.startswith((".", "~")) or hub_name.count("/") > 1:
        raise ChatError(f"model.path: folder must exist, got {path}; check the path, or give a hub name like org/model")
    elif (found := hub_file(path, name)) is None:
        return {}
    else:
        file = found
    if not file.is_file():
        return {}
    try:
        return read_mapping(file)
    except (OSError, Unreadable) as error:
        raise ChatError(f"model.path: {error}; copy it again") from error


def template_in(folder: Path) -> str | None:
    """The chat template in a folder of a model or an adapter, of several the one named "default"; None where there is
    none. Raises Unreadable, ChatError."""
    try:
        return read_text(folder / "chat_template.jinja", LONGEST_TEMPLATE)
    except FileNotFoundError:
        found = read_json(str(folder), "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        found = {str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    return found if isinstance(found, str) else None


def has_template(path: str) -> bool:
    """Whether the model at `path`, a folder, a hub name or name@revision, has a chat template. Raises ChatError."""
    if _is_folder(path):
        try:
            return template_in(Path(path)) is not None
        except Unreadable as error:
            raise ChatError(f"model.path: {error}; copy it again") from error
    found = hub_file(path, "chat_template.jinja") or read_json(path, "tokenizer_config.json").get("chat_template")
    return bool(found)
