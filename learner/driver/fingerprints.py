"""What a run was made from, by content and not by path: its data, its reward functions, its loss, its base model.

A checkpoint keeps these beside the weights. The same path may hold other rows tomorrow, and a run resumed on them would
train twice on some, never on others, and on what it holds out; while a submitted job's copy of its folder has another
path each time and the same content.
"""

import datetime
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePath
from typing import Any

from cluster.files import digest_of
from cluster.reading import Unreadable, printable, read_mapping
from learner.config import RunConfig
from rewards import pickled
from rewards.config import RewardConfig, adapters_of, classifier_of, functions_of
from rewards.own_imports import own_imports
from rewards.source import grader_version, source_of
from rollout.data.hub import commit_of, split
from rollout.env.loader import code_of

FILE = "inputs.json"  # in a checkpoint
REVISION = "revision"  # the name of what stands for all files of a hub's model
NOT_CACHED = "not in the cache"  # at the end of the revision of one that is still to be downloaded
KINDS = (".safetensors", ".bin", ".json", ".txt", ".jinja", ".model")  # weights, configuration, tokenizer
WHOLE_BYTES = 2**30  # a folder of up to so many is read whole
LONGEST_NAME = 200  # letters that are shown
BLOCKS, BLOCK_BYTES = 64, 2**20  # of a larger one's files: so many blocks of that size, evenly spread


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """Each: name of a part -> its digest, or another short text that changes with the content."""

    data: Mapping[str, str]  # the rows that are trained on, in order
    rewards: Mapping[str, str]  # the file of each reward function, the files of each reward model
    base: Mapping[str, str]  # files of the base model, of the adapter that the run stays close to, and the value's
    loss: Mapping[str, str] = field(default_factory=dict)  # the file of the user's own surrogate, if it is one
    env: Mapping[str, str] = field(default_factory=dict)  # that of the environment

    def to_json(self) -> str:
        """For `read`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, file: Path) -> "Fingerprints":
        """What `to_json` gave, out of a file. Raises FileNotFoundError and Unreadable."""
        found = read_mapping(file)
        parts = {one.name for one in fields(cls)}
        if not {"data", "rewards", "base"} <= found.keys() <= parts or not all(map(_is_part, found.values())):
            raise Unreadable(f"{file} must hold the digests of {', '.join(sorted(parts))}")
        return cls(**found)


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(digest, str) for digest in value.values())


def fingerprints_of(config: RunConfig, rows: Iterable[Mapping[str, Any]]) -> Fingerprints:
    """Of a run that is about to start; `rows` are the columns of its training problems, in the order of their source.

    Reads the base's files whole where they have 1 GiB together or less. Of more than that, files above 64 MiB count by
    their size and 64 blocks of 1 MiB evenly spread, the first (a safetensors header) and the last included: a change
    that leaves all of those alone is not seen.
    """
    base = content_of(config.model.source)
    if config.learner.loss.beta > 0:
        kept = config.model.reference or config.model.adapter
        base |= {f"reference {name}": digest for name, digest in (content_of(kept) if kept else {}).items()}
    if config.learner.value.start is not None:
        base |= {f"value {name}": digest for name, digest in content_of(config.learner.value.start).items()}
    loss = config.learner.loss
    return Fingerprints(
        data=_rows(rows),
        rewards=_rewards(config.rewards),
        base=base,
        loss=_functions([(loss.ratio.rpartition(":")[2], loss.ratio)] if loss.own else []),
        env=_functions((use.rpartition(":")[2], use) for use in code_of(config.env.use, config.env.args)),
    )


def _rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    digest, count = hashlib.sha256(), 0
    written = json.JSONEncoder(sort_keys=True, default=_plain).encode  # json.dumps makes one anew for each row
    for row in rows:
        digest.update(written(row).encode() + b"\n")
        count += 1
    return {"number of rows": str(count), "rows": digest.hexdigest()}


def _plain(value: object) -> str:
    """What JSON has no form for. Of anything else than these the type alone counts: its repr may hold an address."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
        return str(value)
    return type(value).__name__


def _rewards(rewards: Sequence[RewardConfig]) -> dict[str, str]:
    functions = _functions((str(one.name), one.use) for one in functions_of(rewards))
    models = [(one.name, content_of(str(one.adapter))) for one in adapters_of(rewards)]
    models = [
        *models,
        *((one.name, content_of(found)) for one in functions_of(rewards) if (found := classifier_of(one))),
    ]
    return functions | {f"{name}, {file}": digest for name, files in models for file, digest in files.items()}


def _functions(uses: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Of (name, what `use` says): name of a function and of its file -> the content of that file, and likewise of the
    user's own files that it imports; of a pickled function what it does."""
    return {part: content for name, use in uses for part, content in _function(name, use)}


def _function(name: str, use: str) -> Iterator[tuple[str, str]]:
    file = source_of(use)
    if file is None:
        yield name, f"no source {grader_version(use)}".strip()
    elif file.suffix == pickled.SUFFIX:
        yield f"{name} of {file.name}", pickled.digest_in(file)
    else:
        part, by_path = f"{name} of {file.name}", use.rpartition(":")[0].endswith(".py")
        yield part, f"{digest_of(file)['sha256']} {grader_version(use)}".strip()
        for helper in own_imports(file, file.parent) if by_path else ():
            yield f"{part}, {helper.relative_to(file.parent).as_posix()}", str(digest_of(helper)["sha256"])


def content_of(path: str) -> dict[str, str]:
    """File of a model's or adapter's folder -> its digest; of a model of the hub its revision. Both of the folder that
    a commit has in the hub's cache."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return {REVISION: _revision(path)}
    commit = commit_of(folder)
    return ({REVISION: commit} if commit else {}) | _digests(folder)


def differing(new: Mapping[str, str], old: Mapping[str, str]) -> list[str]:
    """The parts that differ. Of a model whose commit both know, that alone counts; of one whose files both know, they
    do."""
    found, ours, theirs = [], _by_model(new), _by_model(old)
    for prefix in dict.fromkeys([*theirs, *ours]):
        now, then = ours.get(prefix, {}), theirs.get(prefix, {})
        names = dict.fromkeys([*then, *now])
        if REVISION in now and REVISION in then:
            names = {REVISION: None}
        elif now.keys() - {REVISION} and then.keys() - {REVISION}:
            names.pop(REVISION, None)
        found += [prefix + name for name in names if now.get(name) != then.get(name)]
    return found


def _by_model(parts: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Files of several models are told apart by a word in front of them."""
    found: dict[str, dict[str, str]] = {}
    for name, digest in parts.items():
        prefix, space, file = name.rpartition(" ")
        found.setdefault(prefix + space, {})[file] = digest
    return found


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.iterdir() if file.suffix in KINDS and file.is_file())
    whole = sum(file.stat().st_size for file in files) <= WHOLE_BYTES
    return {file.name: str(digest_of(file)["sha256"]) if whole else _sampled(file) for file in files}


def same_base(one: str, other: str) -> bool | None:
    """Whether two names are of one model: by the weights where both are folders here, else by name, where a folder of
    the hub's cache is called as its model. None: the names differ, which says nothing for sure."""
    here, there = _folder(one), _folder(other)
    if here is not None and there is not None:
        return here.samefile(there) or _weights(here) == _weights(there)
    names = [re.sub(r".*/models--(.+)/snapshots/.*", r"\1", path).replace("--", "/") for path in (one, other)]
    return True if PurePath(names[0]).name == PurePath(names[1]).name else None


def _folder(path: str) -> Path | None:
    try:
        folder = Path(path).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError):  # what no folder is called: too long, or in the home of nobody
        return None


def base_name(base: str) -> str:
    """The name of a base out of somebody else's file, as one line of a message may have it."""
    return " ".join(printable(base).split())[:LONGEST_NAME]


def _weights(folder: Path) -> dict[str, str]:
    """File of weights -> its digest."""
    return {name: digest for name, digest in _digests(folder).items() if name.endswith(".safetensors")}


def _sampled(file: Path) -> str:
    size = file.stat().st_size
    if size <= BLOCKS * BLOCK_BYTES:
        return str(digest_of(file)["sha256"])
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        for block in range(BLOCKS):
            stream.seek(block * (size - BLOCK_BYTES) // (BLOCKS - 1), os.SEEK_SET)
            digest.update(stream.read(BLOCK_BYTES))
    return f"sampled {digest.hexdigest()}"


def _revision(name: str) -> str:
    """The commit of a model of the hub, which stands for its content: the name of its folder in the cache."""
    from huggingface_hub import try_to_load_from_cache

    model, revision = split(name)
    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(config).parent.name if isinstance(config, str) else f"{name}, which is {NOT_CACHED}"
