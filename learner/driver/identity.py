"""Takes fingerprints of a run's inputs, and checks with them that a run is resumed only from a checkpoint of the same
run.

The inputs (data, reward functions, loss, base model, environment) are compared by content and not by path. The same
path may hold other rows tomorrow, and a run resumed on them would train twice on some rows, never on others, and on
some that it holds out. A submitted job's copy of its folder, however, has a new path each time and the same content.
"""

import datetime
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any

from cluster.errors import WrongInput
from cluster.files import digest_of
from cluster.reading import printable, read_json, read_mapping
from learner.algo.surrogates import Bounds
from learner.config import RunConfig
from learner.config.load import recorded
from learner.driver.checkpoint import ADAPTER, learned_in
from learner.model.adapter_config import MODEL
from rewards import functions as pickled
from rewards.config import MASK, RewardConfig, adapters_of, classifier_of, functions_of
from rewards.loader import grader_version, own_imports, source_of
from rollout.data.model_files import commit_of, split
from rollout.env.host import code_of

FILE = "inputs.json"  # file of a checkpoint that holds the fingerprints
REVISION = "revision"  # part name under which a hub model's commit stands for all of its files
NOT_CACHED = "not in the cache"  # end of the revision of a hub model that is still to be downloaded
KINDS = (".safetensors", ".bin", ".json", ".txt", ".jinja", ".model")  # weights, configuration, tokenizer
WHOLE_BYTES = 2**30  # a folder of at most so many bytes is read whole
LONGEST_NAME = 200  # characters of a base model's name that are shown
BLOCKS, BLOCK_BYTES = 64, 2**20  # blocks that are read, evenly spread, of each large file in a larger folder


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """The fingerprints of a run's inputs. Each field maps the name of a part to its digest, or to another short text
    that changes with the content."""

    data: Mapping[str, str]  # the rows that are trained on, in order
    rewards: Mapping[str, str]  # the file of each reward function, the files of each reward model
    base: Mapping[str, str]  # files of the base model, of reference or teacher, and of the value model's start
    loss: Mapping[str, str] = field(default_factory=dict)  # the file of learner.loss.ratio, if it is the user's own
    env: Mapping[str, str] = field(default_factory=dict)  # the file of the environment

    def to_json(self) -> str:
        """The fingerprints as JSON, which `read` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def read(cls, file: Path) -> "Fingerprints":
        """The fingerprints in a file that `to_json` wrote. Raises FileNotFoundError and WrongInput."""
        found = read_mapping(file)
        parts = {one.name for one in fields(cls)}
        if not {"data", "rewards", "base"} <= found.keys() <= parts or not all(map(_is_part, found.values())):
            raise WrongInput(f"{file} must hold the digests of {', '.join(sorted(parts))}")
        return cls(**found | {part: _since_the_move(found[part]) for part in ("rewards", "env") if part in found})


# Made by tests/moved_functions.py: digest of a file of gleaner's own functions before it was moved -> its digest today.
MOVED_FILE = Path(__file__).with_name("moved_functions.json")
RENAMED = {"judge_settings.py": "judge.py", "trl_rollout.py": "trl.py"}  # names of such files before -> today


def _since_the_move(parts: Mapping[str, str]) -> dict[str, str]:
    """The parts as a run of today would record them: files of gleaner that were moved have their present digests."""
    same: dict[str, str] = json.loads(MOVED_FILE.read_text(encoding="utf-8"))
    found = {}
    for name, content in parts.items():
        digest, space, version = content.partition(" ")
        place, of, file = name.rpartition(" of ")
        found[f"{place}{of}{RENAMED.get(file, file)}"] = f"{same.get(digest, digest)}{space}{version}"
    return found


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(digest, str) for digest in value.values())


def fingerprints_of(config: RunConfig, rows: Iterable[Mapping[str, Any]], *, asks: bool = True) -> Fingerprints:
    """The fingerprints of a run that is about to start. rows: columns of its training problems, in the order of their
    source. asks: whether model.teacher will be asked; a replay has what it said, and may be without it.

    The base model's files are read whole if together they have at most 1 GiB. In a larger folder, a file above 64 MiB
    is represented by its size and 64 blocks of 1 MiB, evenly spread, the first (a safetensors header) and the last
    included: a change outside of these blocks is not noticed.
    """
    base = content_of(config.model.source)
    if config.model.teacher is not None and asks:
        base |= {f"teacher {name}": digest for name, digest in content_of(config.model.teacher).items()}
    elif config.model.teacher is None and config.learner.loss.beta > 0:
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
    written = json.JSONEncoder(sort_keys=True, default=_plain).encode  # json.dumps would make an encoder for each row
    for row in rows:
        digest.update(written(row).encode() + b"\n")
        count += 1
    return {"number of rows": str(count), "rows": digest.hexdigest()}


def _plain(value: object) -> str:
    """A text for a value that JSON cannot hold. Bytes and times count by their value, anything else only by its type,
    since a repr may contain a memory address."""
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
    """Pairs of a function's name and its `use` -> fingerprints: the digest of the function's file, and of each of the
    user's own files that it imports; for a pickled function a digest of what it does."""
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
    """The fingerprints of a model or adapter: for a folder, the digest of each file; for a hub name, its commit; for a
    commit's folder in the hub's cache, both."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return {REVISION: _revision(path)}
    commit = commit_of(folder)
    return ({REVISION: commit} if commit else {}) | _digests(folder)


def differing(new: Mapping[str, str], old: Mapping[str, str]) -> list[str]:
    """The names of the parts that differ. Where both sides have a model's commit, only the commits are compared; else,
    where both have digests of its files, only the digests."""
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
    """The parts by model: the words in front of a file's name (such as `reference`) -> file -> digest."""
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
    """Whether two names mean the same base model. Two folders of this machine are compared by their weights. Otherwise
    the names are compared, that of the model for a folder of the hub's cache; None if they differ, since two names may
    still mean the same model."""
    here, there = _folder(one), _folder(other)
    if here is not None and there is not None:
        return here.samefile(there) or _weights(here) == _weights(there)
    names = [re.sub(r".*/models--(.+)/snapshots/.*", r"\1", path).replace("--", "/") for path in (one, other)]
    return True if PurePath(names[0]).name == PurePath(names[1]).name else None


def _folder(path: str) -> Path | None:
    try:
        folder = Path(path).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError):  # the name is too long for a path, or in the home folder of an unknown user
        return None


def base_name(base: str) -> str:
    """A base model's name from a file of unknown origin, made safe and short enough for a line of a message."""
    return " ".join(printable(base).split())[:LONGEST_NAME]


def _weights(folder: Path) -> dict[str, str]:
    """The digests of a folder's safetensors files."""
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
    """The commit of a hub model, which stands for its content. It is the name of the model's folder in the cache."""
    from huggingface_hub import try_to_load_from_cache

    model, revision = split(name)
    config = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(config).parent.name if isinstance(config, str) else f"{name}, which is {NOT_CACHED}"


# The check at a resume: settings, data, reward functions, loss and base model must be those of the checkpoint.
#
# Settings that decide which numbers a run produces must be equal; the number of processes and their memory may change.
# Paths are not compared where their content is. A user names in resume_allow_changed what differs on purpose.

DECIDING = ("seed", "max_staleness", "model", "data", "rewards", "env", "rollout", "learner")
FREE = (
    "rollout.workers", "rollout.kv_cache", "rollout.max_num_seqs", "rollout.reward_workers", "rollout.process_memory",
    "learner.token_budget", "learner.checkpointing", "learner.restarts", "data.eval",
    "env.variables", "env.concurrency",
)  # fmt: skip
BY_CONTENT = (
    "model.path", "model.revision", "model.adapter", "model.reference", "model.teacher", "learner.value.start",
    "data.path", "data.split", "data.args", "data.size",
)  # fmt: skip
# The saved weights and optimizer states fit only these settings, so resume_allow_changed cannot name them.
FIXED = ("model.dtype", "model.base", "learner.mode", "learner.algorithm", "learner.lora", "learner.optimizer.kind")
RANKS = "cluster.learners"  # must be equal where each rank saves 8-bit states in blocks of its own weights
CONTENTS = ("data", "rewards", "loss", "base", "env")
# Settings that may name a file of the user's.
FUNCTIONS = re.compile(r"rewards\.\d+\.use|env\.use|learner\.loss\.ratio|data\.curriculum")
SHOWN = 40  # characters of a value that a message shows


def check_allowed(config: RunConfig) -> None:
    """Raises WrongInput if resume_allow_changed names a setting that does not exist, or that cannot change."""
    known = [*CONTENTS, *_deciding(config, by_content=False)]
    for key in config.resume_allow_changed:
        if _within(key, FIXED):
            raise WrongInput(
                f"resume_allow_changed: {key} cannot change, since a checkpoint's weights and optimizer are made for "
                "it; leave it out, and start another run with name= and model.adapter="
            )
        if not any(_within(one, [key]) for one in known):
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help for the settings"
            raise WrongInput(
                "resume_allow_changed: must name data, rewards, loss, base or env (their content), or a setting that "
                f"decides a run's numbers, such as learner.learning_rate; got {key}; {hint}"
            )


def check_same_run(config: RunConfig, inputs: Fingerprints, folder: Path) -> list[str]:
    """Compares a run that is about to start with the checkpoint that it would continue from.

    Returns a text for each difference that resume_allow_changed allows.

    Raises:
        WrongInput: there are other differences; the message names all of them, settings with both values.
    """
    then, recorded = _read(folder)
    now, before = (_deciding(one, by_content=recorded is not None) for one in (config, then))
    changes = {
        key: _changed(key, now.get(key), before.get(key))
        for key in dict.fromkeys([*now, *before])
        if not same_value(now.get(key), before.get(key)) and not _hidden(key, before.get(key))
    }
    if recorded is not None:
        changes |= _contents(inputs, recorded)
    fixed = (*FIXED, RANKS)
    allowed = [key for key in changes if _within(key, config.resume_allow_changed) and not _within(key, fixed)]
    refused = [key for key in changes if key not in allowed]
    if refused:
        listed = ", ".join(key for key in refused if not _within(key, fixed))
        last = f", or allow it: resume_allow_changed=[{listed}]" if listed else ""
        raise WrongInput(
            f"resume: {folder} was made with another {', '.join(changes[key] for key in refused)}; give the same "
            f"again, or this run another name= (and {_from(folder.parents[1])} to start from what was learned){last}"
        )
    return [changes[key] for key in allowed]


def _from(run_dir: Path) -> str:
    """The setting with which another run starts from this run's adapter or model."""
    learned = learned_in(run_dir) or run_dir / ADAPTER
    return f"model.{'path' if learned.name == MODEL else 'adapter'}={learned}"


def config_of(folder: Path) -> RunConfig:
    """The configuration of the run that made a checkpoint. Raises WrongInput."""
    try:
        found = read_json(folder / "config.json")
    except (WrongInput, FileNotFoundError) as error:
        raise WrongInput(_unreadable(error)) from None
    try:
        return recorded(found)
    except WrongInput as error:
        first = str(error).splitlines()[0]
        raise WrongInput(
            f"resume: {folder} was made by another version of gleaner, whose configuration this one refuses "
            f"({first}); give this run another name="
        ) from None


def _read(folder: Path) -> tuple[RunConfig, Fingerprints | None]:
    """The configuration and the fingerprints in a checkpoint; None for the latter if an old version wrote none."""
    then = config_of(folder)
    try:
        return then, Fingerprints.read(folder / FILE)
    except FileNotFoundError:
        return then, None
    except WrongInput as error:
        raise WrongInput(_unreadable(error)) from None


def _unreadable(error: Exception) -> str:
    return f"resume: {error}; give the folder of another checkpoint, or this run another name="


def _deciding(config: RunConfig, *, by_content: bool) -> dict[str, Any]:
    """Dotted key -> value, of the settings that decide a run's numbers; by_content: without paths to what is compared
    by content."""
    values = config.model_dump(mode="json")
    given = values["learner"]["loss"]["bounds"]  # each has a name by itself, so that one alone can be allowed to change
    values["learner"]["loss"]["bounds"] = {name: given.get(name) for name in Bounds.__annotations__}
    left_out = [*FREE, *BY_CONTENT] if by_content else FREE
    found = {
        key: value
        for section in DECIDING
        for key, value in leaves(section, values[section])
        if not _within(key, left_out) and not re.fullmatch(r"rewards\.\d+\.env", key)
    }
    if by_content:  # a submitted job's copy of its folder lies elsewhere each time
        named = {key: value for key, value in found.items() if FUNCTIONS.fullmatch(key) and value is not None}
        found |= {key: Path(str(value)).name for key, value in named.items()}
    if config.learner.mode == "full" and config.learner.optimizer.kind == "adamw_8bit":
        found[RANKS] = config.cluster.learners
    held_out = config.data.eval  # problems that are held out of the training data are missing from it
    split = held_out.split if by_content else None  # versions without fingerprints had no held-out split of its own
    elsewhere = held_out.path is not None or split is not None
    return found | {"data.eval": 0 if elsewhere or held_out.every == 0 else held_out.size}


def same_value(one: object, other: object) -> bool:
    """Whether two values are equal, where nan, which a function's arguments may hold, equals nan."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    return one == other


def leaves(key: str, value: object) -> Iterator[tuple[str, object]]:
    """Pairs of dotted key and value, for each value below `key` that is neither a mapping nor a list of mappings."""
    if isinstance(value, Mapping) and value:
        parts: Any = value.items()
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        parts = enumerate(value)
    else:
        yield key, value
        return
    for name, part in parts:
        yield from leaves(f"{key}.{name}", part)


def _within(key: str, ones: Iterable[str]) -> bool:
    """Whether the key is one of `ones` or lies below one of them."""
    return any(key == one or key.startswith(f"{one}.") for one in ones)


def _hidden(key: str, before: object) -> bool:
    """Whether the checkpoint has the value masked, since it is, or looked like, a secret."""
    return "args" in key.split(".") and isinstance(before, str) and MASK in before


def _changed(key: str, now: object, before: object) -> str:
    if "args" in key.split("."):  # arguments may contain secrets, which must not be printed
        return key
    return f"{key} ({_short(before)}, now {_short(now)})"


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _contents(now: Fingerprints, before: Fingerprints) -> dict[str, str]:
    """Name of each content that differs -> a text that lists the parts which differ."""
    found = {}
    for name in CONTENTS:
        new, old = getattr(now, name), getattr(before, name)
        parts = [
            f"{part} {old[part]}, now {new[part]}" if part in new and part in old and len(old[part]) < SHOWN else part
            for part in differing(new, old)
        ]
        if parts:
            found[name] = f"content of {name} ({', '.join(parts)})"
    return found
