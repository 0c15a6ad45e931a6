"""What a call of `train` gives back: where things are, and the numbers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from learner.api.metrics_lines import Metrics
from learner.driver.publishing import learned_in
from learner.model.adapter_config import MODEL

HELD_OUT = "eval/"


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A run that is done, or was stopped with a checkpoint."""

    run_dir: Path
    adapter: Path | None  # in PEFT's format; None after full fine-tuning
    model: Path | None  # the whole model, after full fine-tuning
    metrics: list[Metrics] = field(repr=False)
    """A row for each step of the whole run, `step` among its keys; docs/metrics.md says what each means."""

    @property
    def before(self) -> Metrics:
        """The first held-out scores, `eval/accuracy` among them; empty where nothing was held out."""
        return next(self._held_out(), {})

    @property
    def after(self) -> Metrics:
        """The newest held-out scores."""
        return list(self._held_out())[-1] if self.before else {}

    def _held_out(self) -> Iterator[Metrics]:
        for row in self.metrics:
            scores = {name: value for name, value in row.items() if name.startswith(HELD_OUT)}
            if scores:
                yield {"step": row["step"], **scores}


def result_of(run_dir: Path, rows: list[Metrics]) -> TrainResult:
    """Of the run in the folder, whose metrics are `rows`."""
    learned = learned_in(run_dir)
    whole = learned == run_dir / MODEL
    return TrainResult(run_dir, None if whole else learned, learned if whole else None, rows)
