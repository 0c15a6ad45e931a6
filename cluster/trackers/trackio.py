"""trackio."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.trackers.tracker import Sample, TrackedRun, run_config


class Trackio:
    """A run of the project of TRACKIO_PROJECT, or gleaner, in trackio's own folder (TRACKIO_DIR); `trackio show` shows
    it. Its name is that of the run folder with a part of the id: trackio finds a resumed run by its name."""

    PACKAGE = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "gleaner"),
            name=f"{run.folder.name}-{run.id[:6]}",
            config=run_config(run.folder),
            resume="allow",
            embed=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        from pandas import DataFrame

        rows = [{**sample, "prompt": str(sample["prompt"])} for sample in samples]
        self._run.log({"completions": self._trackio.Table(dataframe=DataFrame(rows))}, step=step)

    def close(self) -> None:
        self._run.finish()
