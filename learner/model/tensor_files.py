"""In which file of a model each of its tensors lies."""

from pathlib import Path

from transformers.utils.hub import cached_file

from cluster.reading import read_mapping
from rollout.data.hub import split
from rollout.data.weight_files import INDEX, SINGLE, WeightsError, header


def tensor_files(path: str) -> dict[str, Path]:
    """Name of each tensor -> its safetensors file. A hub's model is downloaded where it is not in the cache.

    Raises WeightsError if there is none, OSError if the hub has no such model or cannot be reached.
    """
    index = _file(path, INDEX)
    if index is not None:
        where: dict[str, str] = read_mapping(index)["weight_map"]
        files = {name: _file(path, name) for name in sorted(set(where.values()))}
        found = {tensor: files[name] for tensor, name in where.items()}
    else:
        single = _file(path, SINGLE)
        found = dict.fromkeys(header(single, "model.path"), single) if single is not None else {}
    there = {tensor: file for tensor, file in found.items() if file is not None}
    if not there or len(there) < len(found):
        raise WeightsError(f"model.path: {path} must have {SINGLE}, or {INDEX} and all files that it names")
    return there


def _file(path: str, name: str) -> Path | None:
    model, revision = split(path)
    found = cached_file(model, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
