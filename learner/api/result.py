"""What a call of `train` gives back: where things are, and the numbers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from learner.api.metrics_lines import Metrics
from learner.driver.checkpoint import learned_in
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

    def _repr_html_(self) -> str:
        """What a notebook shows: held-out scores and the reward before and after, and where things are."""
        steps = [row for row in self.metrics if "reward/mean" in row]
        after = self.after
        found = [(name, value, after.get(name)) for name, value in self.before.items() if name != "step"]
        if steps:
            found.insert(0, ("reward/mean", steps[0]["reward/mean"], steps[-1]["reward/mean"]))
        rows = [
            [name, f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}"]
            for name, first, last in found
            if first is not None and last is not None
        ]
        head = f"{self.run_dir.name}: {len(steps)} steps; {self.adapter or self.model or 'nothing published'}"
        cells = [["", "first", "last", "change"], *rows]
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
        return f"<p>{escape(head)}</p><table>{body}</table>"

    @property
    def advice(self) -> list[str]:
        """What the last steps leave to be learned from, in sentences, those of the end of the run: nearly all
        completions were cut off, no token was trained on, or all completions score the same. Empty where there is
        signal, or no run folder any more."""
        from learner.config import load
        from learner.driver.metrics import SignalWatch

        file = self.run_dir / "config.yaml"
        if not file.is_file():
            return []
        watch = SignalWatch(load.load_config(str(file), []))
        for row in self.metrics:
            if row["step"]:
                watch.add(row)
        return watch.advice()

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
