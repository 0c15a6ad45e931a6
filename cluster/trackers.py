"""Where the metrics of a step go beside metrics.jsonl. A tracker is one class here and one row of TRACKERS."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """One place that shows metrics. Its constructor is given the run folder."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The metrics of one step by name; finite ones only."""
        ...

    def close(self) -> None:
        """Writes what is still held back, and lets go."""
        ...


class TensorBoard:
    """Event files in `tensorboard/` of the run folder."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary import Writer  # torch's own writer would load torch into this process

        self._writer = Writer(str(run_dir / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


TRACKERS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard}


def known_tracker(name: str) -> str:
    """The name itself if it is one of TRACKERS. Raises ValueError."""
    if name not in TRACKERS:
        raise ValueError(f"must be one of {', '.join(TRACKERS)}, got {name!r}; leave it out")
    return name
