"""Weights & Biases."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.trackers.tracker import Sample, TrackedRun, run_config

INIT_S = 60.0
COLUMNS = ("step", "prompt", "completion", "reward")


class WandB:
    """A run of the project of WANDB_PROJECT, or gleaner, named as the run folder; a resumed run goes on in it.

    Curves are over `step`, a metric of its own: of a step of W&B's own that it has had already it takes no more.

    WANDB_MODE=offline writes to `wandb/` of the run folder, for `wandb sync` later.
    """

    PACKAGE = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        offline = os.environ.get("WANDB_MODE", "online") in ("offline", "disabled")
        if not offline and not wandb.login(prompt=False):  # or else it would ask on the terminal
            raise RuntimeError("it wants a login: run `wandb login`, or set WANDB_MODE=offline")
        self._wandb: Any = wandb
        self._rows: list[tuple[Any, ...]] = []
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "gleaner"),
            name=run.folder.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            config=run_config(run.folder),
            settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_S),
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def completions(self, step: int, samples: Sequence[Sample]) -> None:
        """One table, which grows: W&B shows the newest of a name."""
        self._rows += [(step, str(s["prompt"]), s["completion"], s["reward"]) for s in samples]
        table = self._wandb.Table(columns=list(COLUMNS), data=self._rows)
        self._run.log({"completions": table, "step": step})

    def close(self) -> None:
        self._run.finish()
