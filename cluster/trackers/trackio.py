"""trackio."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.trackers.tracker import Sample, run_config


class Trackio:
    """A run of the project of TRACKIO_PROJECT, or gleaner, in trackio's own folder (TRACKIO_DIR); `trackio show` shows
    it. A resumed run goes on in it."""

    PACKAGE = "trackio"

    def __init__(self, run_dir: Path) -> None:
        import trackio

        self._trackio: Any = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "gleaner"),
            name=run_dir.name,
            config=run_config(run_dir),
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
