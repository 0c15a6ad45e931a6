"""Finds and reads a model's files, in a folder or on the hub, and checks that its weights are there and undamaged."""

import json
import logging
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
import numpy.typing as npt
from huggingface_hub import try_to_load_from_cache

from cluster.errors import WrongInput
from cluster.reading import MIB, opened, read_mapping, read_text
from rollout.data.files import is_file_name, is_pattern
from rollout.text_part import of_text, text_adapter

# Whether the hub can be reached. One quick connection tells; the hub's client would try for half a minute at each file.

log = logging.getLogger("rollout")

CONNECT_S = 4.0  # seconds that the connection may take
# Modules that read HF_HUB_OFFLINE when they are imported, which may have happened before `settle`.
READERS = ("huggingface_hub.constants", "datasets.config")
PINNED = re.compile(r"(\w[\w.-]*(?:/[\w.-]+)?)@(.+)")  # name@revision
LONGEST = 200  # letters of a name that is looked for on the disk; a longer one is no file's name


def settle(paths: Iterable[str | None]) -> None:
    """Sets HF_HUB_OFFLINE, for this process and those that it starts, if one of `paths` is a hub name and the hub
    cannot be reached. Behind a proxy this does nothing."""
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
    """Whether environment variables switch the hub off, by huggingface_hub's own rules."""
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE", "")
    return said.upper() in ("1", "ON", "YES", "TRUE")


def unreachable() -> str | None:
    """The hub's host, if it cannot be reached within CONNECT_S seconds; else None."""
    url = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    host, port = url.hostname or "huggingface.co", url.port or (80 if url.scheme == "http" else 443)
    return None if _connects(host, port) else host


def is_hub_name(path: str) -> bool:
    """Whether the path of a model or of data is a hub name."""
    local = path.startswith(("/", ".", "~", "rg:", "env:")) or is_file_name(path) or is_pattern(path)
    plain = path.count("/") <= 1 and not local
    return plain and len(path) < LONGEST and not Path(path).exists()


def joined(name: str, revision: str | None) -> str:
    """`name@revision`, by which all processes name a model with a revision; without a revision the name itself."""
    return name if revision is None else f"{name}@{revision}"


def split(model: str) -> tuple[str, str | None]:
    """Returns (name, revision) of a model that `joined` has named."""
    found = PINNED.fullmatch(model)
    if found is None or (len(model) < LONGEST and Path(model).exists()):
        return model, None
    return found[1], found[2]


def commit_of(folder: Path) -> str | None:
    """The commit of a model's folder in the hub's cache; None for any other folder."""
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

    # The attempt has a thread of its own, since the look-up of a host's name has no time-out.
    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    return reached.is_set()


# A model's tokenizer and JSON files, from a folder or from the hub.

CONFIG = "config.json"  # every model has this file
LONGEST_TEMPLATE = MIB  # bytes of a chat template
# Tokenizer classes that AutoTokenizer would load as PreTrainedTokenizerFast. That class does not import torch, which
# AutoTokenizer does: 2 s instead of 6 s, and 300 MB less in every process that only needs a tokenizer.
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(path: str, key: str = "model.path") -> Any:
    """The tokenizer of the model at `path`, a folder, a hub name or name@revision. Raises WrongInput. key: the setting
    that names the model."""
    name, revision = split(path)
    try:
        if read_json(path, "tokenizer_config.json", key).get("tokenizer_class") in PLAIN_CLASSES:
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(name, revision=revision or "main", trust_remote_code=False)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except WrongInput:
        raise
    except Exception as error:  # the tokenizers library has no exceptions of its own
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        if "custom code" in reason:
            raise WrongInput(
                f"{key}: the tokenizer of {path} needs Python code that comes with it, and such code is never "
                "run; save it as a tokenizer.json, or give another model"
            ) from error
        raise WrongInput(f"{key}: {path} must hold a tokenizer that transformers can load: {reason}") from error


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # the name is too long, or cannot be a path
        return False


def hub_file(model: str, file: str, key: str = "model.path") -> Path | None:
    """A file of a hub model (`name` or `name@revision`), which is downloaded if it is not in the cache. None if the
    model has no such file; offline, if the cached commit has none. Raises WrongInput. key: the setting that names the
    model, and with name@revision its revision, too, but for model.path."""
    # Imported here, since this takes 50 ms and folders do not need it.
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
        raise WrongInput(_not_cached(name, revision, key)) from error
    except EntryNotFoundError:
        return None
    except RevisionNotFoundError as error:
        raise WrongInput(
            f"{_of_revision(key)}: must be a branch, tag or commit of the hub's {name}, which has no {revision}; "
            "choose one on the model's page (Files and versions), or leave it out for the newest"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise WrongInput(
            f"{key}: must be a folder or a hub model that you may read, got {name[:100]}: "
            f"{str(error).strip().splitlines()[0][:200]}; check the name, or log in with: hf auth login"
        ) from error


def _of_revision(key: str) -> str:
    """The setting that names the revision of a model."""
    return "model.revision" if key == "model.path" else key


def _not_cached(name: str, revision: str | None, key: str) -> str:
    if revision is None:
        return (
            f"{key}: {name} is neither a folder here nor a hub model in the cache, and the hub cannot be "
            "reached; download it first (hf download), or give a folder"
        )
    return (
        f"{_of_revision(key)}: must be one of {name} that is in the cache, since the hub cannot be reached, got "
        f"{revision}; download it first (hf download {name} --revision {revision}), or give one that is there"
    )


def read_json(path: str, name: str, key: str = "model.path") -> dict[str, Any]:
    """The content of a JSON file of a model's folder or of a hub model (`name` or `name@revision`); {} if the model has
    no such file. Raises WrongInput. key: as of load_tokenizer."""
    hub_name, _ = split(path)
    if _is_folder(path):
        file = Path(path) / name
    elif Path(path).is_absolute() or path.startswith((".", "~")) or hub_name.count("/") > 1:
        raise WrongInput(f"{key}: folder must exist, got {path}; check the path, or give a hub name like org/model")
    elif (found := hub_file(path, name, key)) is None:
        return {}
    else:
        file = found
    if not file.is_file():
        return {}
    try:
        return read_mapping(file)
    except (OSError, WrongInput) as error:
        raise WrongInput(f"{key}: {error}; copy it again") from error


def template_in(folder: Path, key: str = "model.path", then: str = "copy it again") -> str | None:
    """The chat template in the folder of a model or an adapter; if there are several, the one named "default"; None if
    there is none. Raises WrongInput, which names `key` and says what to do `then`."""
    try:
        return read_text(folder / "chat_template.jinja", LONGEST_TEMPLATE)
    except WrongInput as error:
        raise WrongInput(f"{key}: {error}; {then}") from error
    except FileNotFoundError:
        found = _template_of(str(folder))
    if isinstance(found, list):
        found = {str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    return found if isinstance(found, str) else None


def has_template(path: str) -> bool:
    """Whether the model at `path`, a folder, a hub name or name@revision, has a chat template. Raises WrongInput."""
    if _is_folder(path):
        return template_in(Path(path)) is not None
    return bool(hub_file(path, "chat_template.jinja") or _template_of(path))


def _template_of(path: str) -> Any:
    """The chat template in a model's JSON files: the tokenizer's, or that of a processor of text and images."""
    files = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
    return next((found for name in files if (found := read_json(path, name).get("chat_template"))), None)


# Some models come with Python code of their own (`auto_map` in config.json), which gleaner never runs.


def needs_own_code(config: Mapping[str, Any]) -> str | None:
    """The part of the model that only the model's own code can build; None if transformers can build all of it.

    Folders of well-known architectures often still hold code from before transformers had them, which does not matter.
    """
    brought: Mapping[str, Any] = config.get("auto_map") or {}
    if not brought:
        return None
    # Imported here, since this imports torch, which may take 10 s, and few models come with code.
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


# Weight files of a model or an adapter: are all there, complete and valid? The weights are not loaded for this.
#
# A safetensors file is 8 bytes (n, little-endian), n bytes of JSON ({tensor: {dtype, shape, data_offsets}}), and the
# tensors one after the other, so its size shows whether the file is truncated or something else. To find numbers that
# are not finite, all tensors are read once, in pieces.

WEIGHTS_FILE = "adapter_model.safetensors"  # the weights of a PEFT adapter
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LARGEST_HEADER = 100 * 10**6  # bytes; the limit of the safetensors library
SHOWN = 3  # names in an error message
# dtype -> (bytes, the bits of inf, or of F8_E4M3's nan, as a whole number). Without the sign, the bits of inf and nan
# are at least this number, and those of finite numbers are less. So the greatest value of a tensor's bits as signed and
# the greatest as unsigned numbers tell whether all are finite.
EXPONENTS = {
    "F16": (2, 0x7C00), "BF16": (2, 0x7F80), "F32": (4, 0x7F800000), "F64": (8, 0x7FF0 << 48),
    "F8_E5M2": (1, 0x7C), "F8_E4M3": (1, 0x7F),
}  # fmt: skip
PIECE = 2**20  # bytes that are checked at once, so that they stay in a core's cache
SEGMENT = 2**26  # bytes of a tensor that one thread checks
THREADS = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is in a safetensors file."""

    dtype: str  # safetensors' name: BF16, F32, ...
    shape: tuple[int, ...]
    file: Path
    begin: int  # the first byte of the tensor in the file

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, for dtypes of whole bytes, whose names end in their bits."""
        bits = re.search(r"(\d+)", self.dtype)
        return math.prod(self.shape) * (int(bits[1]) if bits else 8) // 8


def model_weights(path: str, key: str = "model.path") -> dict[str, Stored] | None:
    """All weights of a model by name; None for a hub model whose weights are not in this machine's cache. Of a
    checkpoint with towers these are the weights of its text part, by a text model's names (rollout.text_part).

    Raises WrongInput, which names `key`.
    """
    try:
        folder = Path(path).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError):  # the path can be no folder's name, which rollout.data.chat reports
        return None
    if not is_folder:
        cached = next((file for name in (INDEX, SINGLE) if isinstance(file := _cached(path, name), str)), None)
        if cached is None:
            return None
        folder = Path(cached).parent
    index = folder / INDEX
    if index.is_file() or (folder / SINGLE).is_file():
        stored = _sharded(index, key) if index.is_file() else header(folder / SINGLE, key)
        return of_text(read_json(str(folder), CONFIG), stored)
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        raise WrongInput(
            f"{key}: {folder} holds pickled weights alone ({pickled[0]}), and reading it can run any code; save "
            "it anew with save_pretrained, which writes safetensors"
        )
    raise WrongInput(f"{key}: {folder} must hold {SINGLE} or {INDEX}, and has neither; copy the weights there")


def adapter_weights(folder: str, key: str) -> dict[str, Stored]:
    """All weights in a PEFT adapter's folder by a text model's names (rollout.text_part).

    Raises WrongInput, which names `key`.
    """
    file = Path(folder).expanduser() / WEIGHTS_FILE
    if not file.is_file():
        raise WrongInput(f"{key}: must be the folder of a PEFT adapter, got {folder}, which has no {WEIGHTS_FILE}")
    return text_adapter(header(file, key))


def header(file: Path, key: str) -> dict[str, Stored]:
    """All tensors of a safetensors file by name. Raises WrongInput, which names `key`, if header or size are wrong."""
    try:
        with opened(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            first = stream.read(8)
            length = int.from_bytes(first, "little")
            fits = len(first) == 8 and 2 <= length <= min(LARGEST_HEADER, size - 8)
            text = stream.read(length) if fits else b""
    except OSError as error:
        raise WrongInput(f"{key}: {file} cannot be read: {error.strerror}; copy it again") from error
    except WrongInput as error:
        raise WrongInput(f"{key}: {error}; copy it again") from None
    if first == b"version ":  # how a pointer of git-lfs begins
        raise WrongInput(f"{key}: {file} is a pointer of git-lfs, not the weights; run: git lfs pull")
    if not fits:
        raise WrongInput(f"{key}: {file} is no safetensors file ({size} bytes); copy or save it again")
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        found = {name: _entry(entry, file, 8 + length) for name, entry in entries.items()}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise WrongInput(f"{key}: the header of {file} is damaged ({type(error).__name__}); copy it again") from error
    if size != 8 + length + end:
        raise WrongInput(f"{key}: {file} must have {8 + length + end} bytes by its header, got {size}; copy it again")
    return found


def _entry(entry: Any, file: Path, data: int) -> Stored:
    begin, end = entry["data_offsets"]
    found = Stored(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), file, data + begin)
    if not 0 <= begin <= end or (found.dtype in EXPONENTS and end - begin != found.nbytes):
        raise ValueError("offsets")
    return found


def _sharded(index: Path, key: str) -> dict[str, Stored]:
    try:
        where = dict(read_mapping(index)["weight_map"])
        names: Iterable[str] = sorted({Path(name).name for name in where.values()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise WrongInput(f"{key}: {index} has no readable weight_map; copy it again") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise WrongInput(
            f"{key}: {index} names {len(missing)} files that are not there, first {missing[0]}; copy them there"
        )
    if SINGLE not in names and (index.parent / SINGLE).is_file():
        raise WrongInput(
            f"{key}: {index.parent} holds weights twice, in {SINGLE}, which transformers reads, and in the files of "
            f"{INDEX}, which vLLM reads; take away those that are not meant"
        )
    shards = {name: header(index.parent / name, key) for name in names}
    lost = sorted(tensor for tensor, name in where.items() if tensor not in shards[Path(name).name])
    if lost:
        raise WrongInput(
            f"{key}: {index} says that {lost[0]} lies in {where[lost[0]]}, and it does not ({len(lost)} such); "
            "copy index and files from one place"
        )
    twice = [
        (tensor, name)
        for tensor, home in sorted(where.items())
        for name in names
        if name != Path(home).name
        and tensor in shards[name]
        and not same_content(shards[name][tensor], shards[Path(home).name][tensor])
    ]
    if twice:
        tensor, name = twice[0]
        raise WrongInput(
            f"{key}: {index} says that {tensor} lies in {where[tensor]}, and {name} holds another one of that name "
            f"({len(twice)} such), which some libraries take; copy index and files from one place"
        )
    return {tensor: stored for shard in shards.values() for tensor, stored in shard.items()}


def _cached(name: str, file: str) -> Any:
    try:
        model, revision = split(name)
        return try_to_load_from_cache(model, file, revision=revision)
    except ValueError:  # the name cannot be a hub name, which rollout.data.chat reports
        return None


def check_finite(stored: Mapping[str, Stored], path: str, key: str) -> None:
    """Raises WrongInput, which names `key` and the tensors, if tensors hold nan or inf. One core reads 270 MB in a
    tenth of a second."""
    segments = [segment for one in stored.items() for segment in _segments(*one)]
    try:
        with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
            found = [name for name, wrong in threads.map(_looked_at, segments) if wrong]
    except OSError as error:
        raise WrongInput(f"{key}: {error.filename or path} cannot be read: {error.strerror}; copy it again") from error
    if found:
        raise WrongInput(infinite(sorted(set(found)), path, key))


def infinite(names: list[str], path: str, key: str) -> str:
    """The error message for tensors that hold nan or inf."""
    return (
        f"{key}: {path} holds numbers that are not finite (nan or inf) in {counted(names)}: {shown(names)}; copy or "
        "save the weights again"
    )


def counted(names: Collection[str]) -> str:
    """How many tensors, in words."""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def shown(names: list[str]) -> str:
    """The first few of the names."""
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def all_finite(bits: npt.NDArray[Any], exponent: int) -> bool:
    """Whether no number is inf or nan. bits: the numbers' bits as signed whole numbers. exponent: see EXPONENTS."""
    if not bits.size:
        return True
    unsigned = bits.view(f"u{bits.itemsize}")
    return bool(bits.max() < exponent) and bool(unsigned.max() < exponent + (1 << (8 * bits.itemsize - 1)))


def _segments(name: str, one: Stored) -> Iterator[tuple[str, Stored, int, int]]:
    if one.dtype in EXPONENTS:
        for begin in range(0, one.nbytes, SEGMENT):
            yield name, one, begin, min(begin + SEGMENT, one.nbytes)


def _looked_at(segment: tuple[str, Stored, int, int]) -> tuple[str, bool]:
    """Returns (the tensor's name, whether this segment holds a number that is not finite)."""
    name, one, begin, end = segment
    width, exponent = EXPONENTS[one.dtype]
    piece = bytearray(PIECE)
    with one.file.open("rb", buffering=0) as stream, memoryview(piece) as view:
        stream.seek(one.begin + begin)
        for size in (min(PIECE, end - at) for at in range(begin, end, PIECE)):
            if stream.readinto(view[:size]) != size:
                raise OSError(0, "it ends too early", str(one.file))
            if not all_finite(np.frombuffer(piece, f"<i{width}", size // width), exponent):
                return name, True
    return name, False


def same_content(one: Stored, other: Stored) -> bool:
    """Whether two tensors hold the same bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as here, other.file.open("rb") as there:
        here.seek(one.begin)
        there.seek(other.begin)
        sizes = [min(PIECE, one.nbytes - begin) for begin in range(0, one.nbytes, PIECE)]
        return all(here.read(size) == there.read(size) for size in sizes)
