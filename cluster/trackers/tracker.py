"""What a tracker is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from cluster.dotted import dotted

Sample = Mapping[str, Any]  # of an evaluation: prompt, completion, reward


class Tracker(Protocol):
    """One place that shows metrics. All of its methods run in a thread of its own, and what they raise ends it, not
    the run. A class may name what has to be installed for it: PACKAGE."""

    def __init__(self, run_dir: Path) -> None: ...

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
    import yaml

    return dotted(yaml.safe_load((run_dir / "config.yaml").read_text()))
