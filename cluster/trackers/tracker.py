"""What a tracker is."""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cluster.dotted import dotted
from cluster.files import writing
from cluster.reading import Unreadable, read_text
from cluster.yaml_tree import read_yaml

Sample = Mapping[str, Any]  # of an evaluation: prompt, completion, reward
ID = "tracker_id"  # of the run folder
LONGEST = 1000  # bytes of it


class TrackedRun(NamedTuple):
    """A run as a tracker knows it.

    id: a run that goes on from a checkpoint keeps it; one that begins anew, in the same folder or in one of the same
    path elsewhere, has another. finished: steps before this start; later ones may have been told already, if the run
    goes back to a checkpoint.
    """

    folder: Path
    id: str
    finished: int


def tracked(folder: Path, finished: int) -> TrackedRun:
    """The run of this folder, with the id that lies there, or a new one; one that began before there were such goes on
    by the digest of its path."""
    file = folder / ID
    kept = known_id(folder) if finished > 0 else ""
    if not kept:
        begun = finished > 0 and not file.exists()
        kept = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16] if begun else secrets.token_hex(8)
        with writing(file):
            file.write_text(kept + "\n")
    return TrackedRun(folder, kept, finished)


def known_id(folder: Path) -> str:
    """The id that lies in a run's folder, or ''. Raises Unreadable."""
    try:
        kept = read_text(folder / ID, LONGEST).strip()
    except FileNotFoundError:
        return ""
    if not re.fullmatch(r"[\w.-]*", kept):
        raise Unreadable(f"{folder / ID} must hold the run's id, of letters, digits, dots and dashes; take it away")
    return kept


class Tracker(Protocol):
    """One place that shows metrics. All of its methods run in a thread of its own, and what they raise ends it, not
    the run. A class may name what has to be installed for it: PACKAGE."""

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of one step by name; finite ones only."""
        ...

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        """A few completions to held-out problems, for those who have a place for text."""
        ...

    def close(self) -> None:
        """Writes what is still held back, and lets go."""
        ...


def run_config(run_dir: Path) -> dict[str, Any]:
    """The configuration of the run, with dots between the parts of a key."""
    return dotted(read_yaml(run_dir / "config.yaml"))
