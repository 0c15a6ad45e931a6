"""What a person sees of a run: a live table on a terminal, plain lines elsewhere, a summary at the end."""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from learner.driver.batch_metrics import function_means
from learner.driver.evaluate import Evaluation
from learner.driver.phases import Phases, sentence
from learner.driver.publishing import learned_in
from learner.driver.terminal_text import escaped

MISMATCH, STALENESS = "policy/mismatch_k3", "policy/staleness_mean"
COLUMNS = {
    "reward": ("reward/mean", "{:.3f}"),
    "accuracy": ("eval/accuracy", "{:.3f}"),
    "tokens/s": ("rollout/tokens_per_s", "{:.0f}"),
    "length": ("rollout/completion_length", "{:.0f}"),
    "staleness": (STALENESS, "{:.1f}"),
    "mismatch": (MISMATCH, "{:.1e}"),
    "generate s": ("time/generate", "{:.2f}"),
    "train s": ("time/train", "{:.2f}"),
    "push s": ("time/push", "{:.2f}"),
}
# Most policy/mismatch_k3 that is usual, by the coarsest type that a logprob goes through, where the policy that is
# trained is the one that sampled (staleness 0): of SmolLM2-135M and of the demo.
USUAL = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 5e-3, "fp8": 1e-2}
EXAMPLES = 3  # of completions, at the end
ROWS = 12
RECENT = 20  # steps whose median says how long those to come will take
Sample = Mapping[str, Any]  # of Evaluation.samples
COUNTED = "eval/unscored"  # an evaluation without it has counted none


class Progress:
    """Context manager; `step` and `note` print. On a terminal the last steps stay in place as a table, until it is
    gone (learner.driver.standard_streams).

    dtype: the coarsest that a logprob goes through (Settings.kv_dtype)."""

    def __init__(self, total_steps: int, dtype: str, console: Console | None = None) -> None:
        self.total_steps, self._dtype = total_steps, dtype
        self._told_usual = False
        self.console = console or Console()
        self._rows: deque[list[str]] = deque(maxlen=ROWS)
        self._status = "starting"
        self._live: Live | None = None
        self._seconds: list[float] = []  # of each step

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self._live = Live(self._picture(), console=self.console, auto_refresh=False)
            self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)
            self._live = None

    def _still_live(self) -> bool:
        """Whether there is a table. Where the terminal has gone, lines take its place."""
        if self._live is not None and not self.console.is_terminal:
            self.__exit__()
            self.console = Console(file=self.console.file)
            self.console.line()  # behind the table, which is without one where there is no terminal
        return self._live is not None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One finished step."""
        left = self._left(step, metrics)
        cells = [form.format(metrics[key]) if key in metrics else "" for key, form in COLUMNS.values()]
        means = function_means(metrics)
        parts = ", ".join(f"{escaped(name)} {value:.3f}" for name, value in means.items()) if len(means) > 1 else ""
        where = f"{step}/{self.total_steps}"
        usual = self._usual(metrics[MISMATCH], metrics.get(STALENESS, 0.0)) if MISMATCH in metrics else ""
        if not self._still_live():
            if parts:
                cells[0] += f" ({parts})"
            if usual:
                cells[[*COLUMNS].index("mismatch")] += f" ({usual})"
            words = " ".join(f"{name} {cell}" for name, cell in zip(COLUMNS, cells, strict=True) if cell)
            self.console.print(f"step {where} {words}{left}", highlight=False, soft_wrap=True, markup=False)
        else:
            if usual:
                self.note(f"step {where}: mismatch {cells[[*COLUMNS].index('mismatch')]} ({usual})")
            self._rows.append([where, *cells])
            self._status = f"step {step} of {self.total_steps}{left}" + (f"; {parts}" if parts else "")
            self._show()

    def _usual(self, mismatch: float, staleness: float) -> str:
        """What it is usually below: the first time that there is one, and where it is above."""
        usual = USUAL.get(self._dtype)
        if usual is None or staleness > 0 or (self._told_usual and mismatch <= usual):
            return ""
        self._told_usual = True
        return f"k3, nats; usual in {self._dtype}: at most {usual:.0e}"

    def _left(self, step: int, metrics: Mapping[str, float]) -> str:
        """How long the steps to come will take; nothing for step 0, an evaluation before the first."""
        if "time/step" not in metrics:
            return ""
        self._seconds.append(metrics["time/step"])
        return f", {duration((self.total_steps - step) * median(self._seconds[-RECENT:]))} left"

    def note(self, text: str) -> None:
        """A remark on a line of its own, above the table on a terminal, where it is the status, too."""
        live = self._still_live()
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)
        self._status = text
        if live:
            self._show()

    def _show(self) -> None:
        assert self._live is not None
        self._live.update(self._picture(), refresh=True)

    def _picture(self) -> Group:
        table = Table("step", title="gleaner", title_justify="left")
        for name in COLUMNS:
            table.add_column(name, min_width=len("1.0e-06") if name == "mismatch" else None)  # with its exponent
        for row in self._rows:
            table.add_row(*row)
        return Group(table, Text(self._status))

    def summary(self, evaluations: Sequence[Evaluation], run_dir: Path, phases: Phases, advice: Sequence[str]) -> None:
        """Before and after: scores, some completions, where the time went, and where what was trained is."""
        if evaluations:
            first, last = evaluations[0], evaluations[-1]
            self.console.print(_before_after(first, last))
            self._examples(first.samples, last.samples if last is not first else [])
        self.note(f"time     {sentence(phases.seconds)}")
        for advised in advice:
            self.note(f"advice   {advised}")
        if (learned := learned_in(run_dir)) is not None:
            self.console.print(f"{learned.name:8} {learned}", highlight=False, soft_wrap=True)
        self.console.print(f"metrics  {run_dir / 'metrics.jsonl'}", highlight=False, soft_wrap=True)

    def _examples(self, first: Sequence[Sample], last: Sequence[Sample]) -> None:
        """Completions that have changed, those whose reward has first. last: nothing where a run was stopped before its
        second evaluation."""
        pairs = list(zip(first, last, strict=False))  # eval.size may have changed
        changed = [(old, new) for old, new in pairs if old["completion"] != new["completion"]]
        changed.sort(key=lambda pair: pair[0]["reward"] == pair[1]["reward"])
        for old, new in changed[:EXAMPLES]:
            lines = _asked(old)
            lines.append(_said("before", old), style="not bold")
            lines.append(_said("after", new), style="not bold")
            self.console.print(lines, soft_wrap=True)
        if pairs:
            self.note(f"examples {len(changed)} of the first {len(pairs)} held-out completions are others than before")
        for old in first[:EXAMPLES] if not changed else ():
            lines = _asked(old)
            lines.append(_said("both" if pairs else "before", old), style="not bold")
            self.console.print(lines, soft_wrap=True)


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min"


def _before_after(first: Evaluation, last: Evaluation) -> Table:
    """What an evaluation does not have is a dash; a run stopped before its second one has one column."""
    both = last is not first
    table = Table("held-out", f"step {first.step}", *([f"step {last.step}", "change"] if both else []), title="summary")
    for key in sorted({*first.metrics, *last.metrics}):
        none = 0.0 if key == COUNTED else None
        before, after = first.metrics.get(key, none), last.metrics.get(key, none)
        change = None if before is None or after is None else after - before
        cells = [_cell(before, ".3f"), _cell(after, ".3f"), _cell(change, "+.3f")]
        table.add_row(Text(escaped(key)), *cells[: 3 if both else 1])
    return table


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _asked(sample: Sample) -> Text:
    return Text(f"prompt  {escaped(str(sample['prompt']))}\n", style="bold")


def _said(when: str, sample: Sample) -> str:
    return f"{when:6}  {escaped(str(sample['completion']))}  (reward {_short(sample['reward'])})\n"


def _short(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:.3g}"
