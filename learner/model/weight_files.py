"""Weights at rest: whether every file of a model or adapter is there and whole, by headers alone, without loading any.

A safetensors file is 8 bytes (n, little-endian), n bytes of JSON ({tensor: {dtype, shape, data_offsets}}), and the
tensors one after the other: a file that is cut, or is something else, is known by its size.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from rollout.data.hub import split

WEIGHTS_FILE = "adapter_model.safetensors"  # of a PEFT adapter
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LARGEST_HEADER = 100 * 10**6  # bytes; the limit of the safetensors library


class WeightsError(ValueError):
    """Weights that are missing, or not whole; one line that says which file, what is wrong with it, and what to do."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file."""

    dtype: str  # in safetensors' letters: BF16, F32, ...
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of types of whole bytes, whose letters end in their bits."""
        bits = re.search(r"(\d+)", self.dtype)
        return math.prod(self.shape) * (int(bits[1]) if bits else 8) // 8


def model_weights(path: str, key: str = "model.path") -> dict[str, Stored] | None:
    """Every tensor of a model by name; None for a hub model of whose weights this machine's cache knows nothing.

    Raises WeightsError, which names `key`.
    """
    try:
        folder = Path(path).expanduser()
        is_folder = folder.is_dir()
    except (OSError, RuntimeError):  # what no folder is called: rollout.data.chat says so
        return None
    if not is_folder:
        cached = next((file for name in (INDEX, SINGLE) if isinstance(file := _cached(path, name), str)), None)
        if cached is None:
            return None
        folder = Path(cached).parent
    index = folder / INDEX
    if index.is_file():
        return _sharded(index, key)
    if (folder / SINGLE).is_file():
        return header(folder / SINGLE, key)
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        raise WeightsError(
            f"{key}: {folder} holds pickled weights alone ({pickled[0]}), and reading it can run any code; save "
            "it anew with save_pretrained, which writes safetensors"
        )
    raise WeightsError(f"{key}: {folder} must hold {SINGLE} or {INDEX}, and has neither; copy the weights there")


def adapter_weights(folder: str, key: str) -> dict[str, Stored]:
    """Every tensor of a PEFT adapter's folder by name. Raises WeightsError, which names `key`."""
    file = Path(folder).expanduser() / WEIGHTS_FILE
    if not file.is_file():
        raise WeightsError(f"{key}: must be the folder of a PEFT adapter, got {folder}, which has no {WEIGHTS_FILE}")
    return header(file, key)


def header(file: Path, key: str) -> dict[str, Stored]:
    """The tensors of a safetensors file whose size is right. Raises WeightsError, which names `key`."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(8)
            length = int.from_bytes(first, "little")
            if first == b"version ":  # how a pointer of git-lfs begins
                raise WeightsError(f"{key}: {file} is a pointer of git-lfs, not the weights; run: git lfs pull")
            if len(first) < 8 or not 2 <= length <= min(LARGEST_HEADER, size - 8):
                raise WeightsError(f"{key}: {file} is no safetensors file ({size} bytes); copy or save it again")
            entries = json.loads(stream.read(length))
        found = {name: _entry(entry) for name, entry in entries.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"), default=0)
    except OSError as error:
        raise WeightsError(f"{key}: {file} cannot be read: {error.strerror}; copy it again") from error
    except WeightsError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{key}: the header of {file} is damaged ({type(error).__name__}); copy it again") from error
    if size != 8 + length + end:
        raise WeightsError(f"{key}: {file} must have {8 + length + end} bytes by its header, got {size}; copy it again")
    return found


def _entry(entry: Any) -> Stored:
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError("offsets")
    return Stored(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))


def _sharded(index: Path, key: str) -> dict[str, Stored]:
    try:
        where = dict(json.loads(index.read_bytes())["weight_map"])
        names: Iterable[str] = sorted({Path(name).name for name in where.values()})
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise WeightsError(f"{key}: {index} has no readable weight_map; copy it again") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise WeightsError(
            f"{key}: {index} names {len(missing)} files that are not there, first {missing[0]}; copy them there"
        )
    shards = {name: header(index.parent / name, key) for name in names}
    lost = sorted(tensor for tensor, name in where.items() if tensor not in shards[Path(name).name])
    if lost:
        raise WeightsError(
            f"{key}: {index} says that {lost[0]} lies in {where[lost[0]]}, and it does not ({len(lost)} such); "
            "copy index and files from one place"
        )
    return {tensor: stored for shard in shards.values() for tensor, stored in shard.items()}


def _cached(name: str, file: str) -> Any:
    try:
        model, revision = split(name)
        return try_to_load_from_cache(model, file, revision=revision)
    except ValueError:  # no name that the hub could have: rollout.data.chat says so
        return None
