"""Files of models, from a folder or the hub, and whether the hub can be reached."""

import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from cluster.errors import WrongInput
from cluster.reading import MIB, Unreadable, read_mapping, read_text
from rollout.data.files import is_file_name, is_pattern

# One quick connection tells whether the hub can be reached; its client would try for half a minute at each file.


# What the parts of Chat raise.


class ChatError(WrongInput):
    """A tokenizer or a conversation that cannot be used; the message says which, why, and what to do."""


log = logging.getLogger("rollout")

CONNECT_S = 4.0
# Modules that read HF_HUB_OFFLINE as they are imported, which may have happened.
READERS = ("huggingface_hub.constants", "datasets.config")
PINNED = re.compile(r"(\w[\w.-]*(?:/[\w.-]+)?)@(.+)")
LONGEST = 200  # letters of a name that is looked for on the disk


def settle(paths: Iterable[str | None]) -> None:
    """Sets HF_HUB_OFFLINE, for this process and those that it starts, if one of `paths` is a hub name and the hub
    cannot be reached. Behind a proxy nothing is tried."""
    if switched_off() or getproxies() or not any(path and is_hub_name(path) for path in paths):
        return
    if (host := unreachable()) is None:
        return
    log.warning("%s cannot be reached within %g s: what is in the hub's cache is used", host, CONNECT_S)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name in READERS:
        if name in sys.modules:
            sys.modules[name].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]


def switched_off() -> bool:
    """Whether the environment says so, read as huggingface_hub does."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE", "")
    return said.upper() in ("1", "ON", "YES", "TRUE")


def unreachable() -> str | None:
    """The hub's host, if it cannot be reached within CONNECT_S."""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host, port = url.hostname or "huggingface.co", url.port or (80 if url.scheme == "http" else 443)
    return None if _connects(host, port) else host


def is_hub_name(path: str) -> bool:
    """Whether a path of a model or of data names something on the hub."""
    local = path.startswith(("/", ".", "~", "rg:", "env:")) or is_file_name(path) or is_pattern(path)
    plain = path.count("/") <= 1 and not local
    return plain and len(path) < LONGEST and not Path(path).exists()


def joined(name: str, revision: str | None) -> str:
    """`name@revision`: what a model with a revision is called in every process that reads it. Without one its name, or
    its folder."""
    return name if revision is None else f"{name}@{revision}"


def split(model: str) -> tuple[str, str | None]:
    """(name, revision) of what `joined` gave."""
    found = PINNED.fullmatch(model)
    if found is None or (len(model) < LONGEST and Path(model).exists()):
        return model, None
    return found[1], found[2]


def commit_of(folder: Path) -> str | None:
    """Of the folder that a model's commit has in the hub's cache, the commit. Else None."""
    found = re.search(r"/models--[^/]+/snapshots/([0-9a-f]{40})$", str(folder))
    return found[1] if found is not None else None


def _connects(host: str, port: int) -> bool:
    reached = threading.Event()

    def attempt() -> None:
        try:
            socket.create_connection((host, port), timeout=CONNECT_S).close()
        except OSError:
            return
        reached.set()

    # In a thread: looking up a name has no time-out of its own.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return reached.is_set()


# Tokenizer and JSON files of a model, from a folder or from the hub.

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


# Models that bring Python code of their own (`auto_map` in config.json), which is never run.


def needs_own_code(config: Mapping[str, Any]) -> str | None:
    """The part of the model that only its own code can build; None if transformers can build all of it.

    Folders of well-known architectures often still bring code from before transformers had them: these pass.
    """
    brought: Mapping[str, Any] = config.get("auto_map") or {}
    if not brought:
        return None
    # Here: with torch, 10 s where nothing has imported it yet; and few models bring code.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = config.get("model_type")
    for name, known in (
        ("AutoConfig", CONFIG_MAPPING),
        ("AutoModelForCausalLM", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ):
        if name in brought and kind not in known:
            return f"{brought[name]} for model_type {kind!r}"
    return None
