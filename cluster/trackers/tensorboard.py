"""TensorBoard."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.trackers.tracker import Sample


class TensorBoard:
    """Event files in `tensorboard/` of the run folder."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary import Writer  # torch's own writer would load torch into this process

        self._writer = Writer(str(run_dir / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        """This writer has scalars only."""

    def close(self) -> None:
        self._writer.close()
