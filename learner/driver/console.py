"""Prints what a person sees of a run: a live table on a terminal, plain lines elsewhere, and a summary at the end. Also
counts where the run's time goes, and what its reward functions print."""

import json
import math
import os
import time
import unicodedata
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cluster.errors import WrongInput
from cluster.files import writing
from cluster.memory.seconds import duration
from cluster.reading import BLOCK, MIB, json_value, read_bytes
from cluster.telemetry import Timeline, number, seconds, union
from learner.driver.checkpoint import learned_in
from learner.driver.evaluate import Evaluation
from learner.driver.metrics import function_means
from rewards.limits import NAME

# Text from a model or an environment, made safe for a terminal.

# Categories of Unicode characters: control, format (among them the marks that reverse text), lone surrogates, private
# use, and separators of lines and paragraphs.
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def escaped(text: str) -> str:
    """The text with an escape in place of each character that a terminal would obey or not show, except line feeds."""
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or unicodedata.category(c) not in HIDDEN else _escape(c) for c in text)


def _escape(character: str) -> str:
    return ascii(character)[1:-1]


# What the reward functions of a run print: the console shows the first lines once, and the number of lines at the end.

SHOWN, LONGEST = 3, 100  # number of lines that are shown, and characters of each
MOST_LINES = (
    64 * 2**20
)  # most bytes of the file; a function that prints each completion would fill a disk in a long run


class RewardOutput:
    """Watches the file of a run's folder into which reward functions print. Lines of earlier starts do not count."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / NAME
        self._begin = self._file.stat().st_size if self._file.is_file() else 0
        self._said, self._cut = False, False
        self._left_out = 0  # number of lines that were cut off

    def first(self) -> str:
        """A line for the user with the first lines that they print; '' before there are any, and at later calls."""
        if self._said or not (part := next(self._parts(), b"")):
            return ""
        self._said = True
        shown = [line.decode(errors="replace")[:LONGEST] for line in part.splitlines()[:SHOWN]]
        return f"reward functions print, into {self._file}; its first lines: {escaped(' | '.join(shown))}"

    def bound(self) -> str:
        """Cuts the file off after its first MOST_LINES bytes. Returns a line for the user at the first cut, else ''.
        What reward functions print at that moment may be lost and not counted: they append to the file themselves."""
        try:
            if not self._file.is_file() or self._file.stat().st_size <= MOST_LINES:
                return ""
            with self._file.open("r+b") as file:
                file.seek(MOST_LINES)
                self._left_out += sum(part.count(b"\n") for part in iter(lambda: file.read(BLOCK), b""))
                file.truncate(MOST_LINES)
        except OSError:  # as in _parts
            return ""
        said, self._cut = self._cut, True
        size = f"{MOST_LINES // 2**20} MiB"
        return (
            "" if said else f"reward functions have printed {size}, which {self._file} keeps; what follows is left out"
        )

    def total(self) -> str:
        """A line for the user at the end of a run, or '' if nothing was printed."""
        count = self._left_out + sum(part.count(b"\n") for part in self._parts())
        cut = f", of which {self._left_out} are left out" if self._left_out else ""
        return f"reward functions printed {count} lines, into {self._file}{cut}" if count else ""

    def _parts(self) -> Iterator[bytes]:
        """The output since this start of the run, in blocks."""
        if not self._file.is_file():
            return
        try:
            with self._file.open("rb") as file:
                file.seek(self._begin)
                yield from iter(lambda: file.read(BLOCK), b"")
        except OSError:  # the file was taken away, which is no reason to end a run
            return


# Where the wall time of a run goes: each second is counted for one phase, so the phases add up to the whole.

PHASES_FILE = "phases.jsonl"
MOST = MIB  # most bytes of the file, which has a line for each start
STARTING = ("preflight", "Ray", "processes")
# A second in which several of these phases run counts for the first of them. So with max_staleness above 0, generation
# has only the seconds in which the learner did not train.
PHASE_KINDS = {
    "evaluation": ("evaluate",),
    "checkpoints": ("checkpoint",),
    "training": ("train", "policy"),
    "generation": ("generate",),
    "weight sync": ("push",),
}


class Phases:
    """Counts the seconds of each phase. began: when counting starts, by time.perf_counter; None: when this process
    started. seconds: phase -> seconds so far."""

    def __init__(self, began: float | None = None) -> None:
        self._began = self._counted = time.perf_counter() - age() if began is None else began
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def until_now(self, name: str) -> None:
        """Counts the seconds since the last call for this phase."""
        now = time.perf_counter()
        self.seconds[name] += now - self._counted
        self._counted = now

    def split(self, timeline: Timeline, name: str) -> None:
        """Counts the seconds since the last call for the phases in the timeline, and the others for phase `name`."""
        now, known, spans = time.perf_counter(), 0.0, list[tuple[float, float]]()
        for phase, kinds in PHASE_KINDS.items():
            for kind in kinds:
                spans = union([*spans, *timeline.busy(kind, self._counted, now)])
            self.seconds[phase] += seconds(spans) - known
            known = seconds(spans)
        self.seconds[name] += now - self._counted - known
        self._counted = now

    @property
    def wall(self) -> float:
        """Seconds counted so far: the sum of all phases."""
        return self._counted - self._began

    def record(self, run_dir: Path, resumed: bool) -> None:
        """Writes a line to the run's folder. A resumed run adds one; a new run replaces the file."""
        line = {"at": round(time.time(), 3), "wall": self.wall, **self.seconds}
        with writing(run_dir / PHASES_FILE), (run_dir / PHASES_FILE).open("a" if resumed else "w") as file:
            file.write(json.dumps(line) + "\n")


def read_phases(run_dir: Path) -> list[dict[str, float]]:
    """The complete lines of the file, oldest first; empty without a file. Raises WrongInput."""
    try:
        text = read_bytes(run_dir / PHASES_FILE, MOST)
    except FileNotFoundError:
        return []
    return [line for line in map(_line, text.splitlines()) if line is not None]


def _line(text: bytes) -> dict[str, float] | None:
    try:
        found = json_value(text, "line")
    except WrongInput:
        return None
    if not isinstance(found, dict) or not {"at", "wall"} <= found.keys():
        return None
    return found if all(map(_is_time, found.values())) else None


def _is_time(value: Any) -> bool:
    return (known := number(value)) is not None and known >= 0


def sentence(seconds: Mapping[str, float]) -> str:
    """A sentence like `65.4 s: start-up 15.2 (preflight 3.9, Ray 2.5, processes 8.8), evaluation 8.1, ...`."""
    starting = [seconds.get(name, 0.0) for name in STARTING]
    parts = ", ".join(f"{name} {spent:.1f}" for name, spent in zip(STARTING, starting, strict=True))
    others = [f"{name} {spent:.1f}" for name, spent in seconds.items() if name not in STARTING]
    return f"{sum(seconds.values()):.1f} s: " + ", ".join([f"start-up {sum(starting):.1f} ({parts})", *others])


def age() -> float:
    """Seconds since this process started; on Linux only."""
    ticks = float(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])  # from boot to process start
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


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
# Coarsest type that a logprob goes through -> largest usual policy/mismatch_k3 at staleness 0 (SmolLM2-135M, the demo).
USUAL = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 5e-3, "fp8": 1e-2}
EXAMPLES = 3  # number of completions that the summary shows
ROWS = 12  # number of steps in the table
# Number of newest steps whose mean time predicts the time that is left. With staleness 1 long and short ones alternate.
RECENT = 20
Sample = Mapping[str, Any]  # an item of Evaluation.samples
COUNTED = "eval/unscored"  # a count, which counts as 0 in an evaluation without this metric


class Progress:
    """Prints the progress of a run: a context manager, inside of which `step` and `note` print. On a terminal the last
    steps are a live table. If the terminal vanishes (learner.driver.process), lines are printed from then on.

    dtype: the coarsest type that a logprob goes through (Settings.kv_dtype). evaluates: evaluation interval.
    """

    def __init__(self, total_steps: int, dtype: str, console: Console | None = None, evaluates: int = 0) -> None:
        self.total_steps, self._dtype, self._evaluates = total_steps, dtype, evaluates
        self._told_usual = False
        self.console = console or Console()
        self._rows: deque[list[str]] = deque(maxlen=ROWS)
        self._status = "starting"
        self._live: Live | None = None
        self._seconds: list[float] = []  # time of each step, without that of an evaluation
        self._evaluations: list[float] = []  # time of each evaluation

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
        """Whether there is a table. Ends the table if the terminal has vanished."""
        if self._live is not None and not self.console.is_terminal:
            self.__exit__()
            self.console = Console(file=self.console.file)
            self.console.line()  # ends the table's last line, which rich leaves open without a terminal
        return self._live is not None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the metrics of a finished step."""
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
        """A clause with the usual bound of the mismatch, for the first one and for each above the bound; else ''."""
        usual = USUAL.get(self._dtype)
        if usual is None or staleness > 0 or (self._told_usual and mismatch <= usual):
            return ""
        self._told_usual = True
        return f"k3, nats; usual in {self._dtype}: at most {usual:.0e}"

    def _left(self, step: int, metrics: Mapping[str, float]) -> str:
        """A clause with the time that is left; '' for step 0, which is only an evaluation."""
        if "time/step" not in metrics:
            return ""
        evaluation = metrics.get("time/evaluate", 0.0)  # of the evaluation before this step
        self._evaluations += [evaluation] * (evaluation > 0)
        self._seconds.append(metrics["time/step"] - evaluation)
        left = (self.total_steps - step) * mean(self._seconds[1:][-RECENT:] or self._seconds)  # the first compiles
        if self._evaluates and self._evaluations:
            to_come = math.ceil(self.total_steps / self._evaluates) - (step - 1) // self._evaluates
            left += to_come * mean(self._evaluations)
        return f", {duration(left)} left"

    def note(self, text: str) -> None:
        """Prints a line. On a terminal it goes above the table, and is also the status below it."""
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
            table.add_column(name, min_width=len("1.0e-06") if name == "mismatch" else None)  # room for an exponent
        for row in self._rows:
            table.add_row(*row)
        return Group(table, Text(self._status))

    def summary(self, evaluations: Sequence[Evaluation], run_dir: Path, phases: Phases, advice: Sequence[str]) -> None:
        """Prints first and last held-out scores, completions, times, advice, and where the adapter or model is."""
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
        """Prints completions that have changed, first those with another reward. last: empty without a second
        evaluation."""
        pairs = list(zip(first, last, strict=False))  # their numbers differ if eval.size was changed
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


def _before_after(first: Evaluation, last: Evaluation) -> Table:
    """A table of the metrics of both evaluations, or of one if they are the same. A missing metric is a dash."""
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
