"""The curves of a run as one line each."""

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Sparkline, Static

from learner.driver.console import escaped
from learner.tools.report.figures import is_score
from learner.tools.report.run_folder import Run

CURVES = (
    "reward/mean", "eval/accuracy", "reward/failed", "rollout/completion_length", "policy/entropy", "policy/kl",
    "policy/mismatch_max", "policy/staleness_mean", "loss/grad_norm", "time/step",
)  # fmt: skip
REWARDS = 4  # of the functions' own numbers, behind these


def names_of(run: Run) -> list[str]:
    """Those that are drawn."""
    known = [name for name in CURVES if name in run.metrics]
    own = [name for name in run.metrics if name.startswith("reward/") and is_score(name) and name not in known]
    return known + own[:REWARDS]


def number(value: float | None) -> str:
    """Three digits of it."""
    return "" if value is None else f"{value:.3g}"


class Curves(VerticalScroll, can_focus=False):
    """A line for each metric: its name, its course, its newest value."""

    DEFAULT_CSS = """
    Curves { height: auto; max-height: 40%; border: round $primary-muted; }
    Curves Horizontal { height: 1; }
    Curves .name { width: 28; color: $text-muted; }
    Curves .value { width: 12; text-align: right; }
    Curves Sparkline { width: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []

    async def draw(self, run: Run) -> None:
        """As the run is now."""
        names = names_of(run)
        if names != self.shown:
            self.shown = names
            await self.remove_children()
            await self.mount(*(_Curve(name) for name in names))
        for name, row in zip(names, self.query(_Curve), strict=True):
            row.draw([value for value in run.metrics[name] if value is not None])


class _Curve(Horizontal):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._metric = name

    def compose(self) -> ComposeResult:
        yield Static(Text(escaped(self._metric), no_wrap=True), classes="name")
        yield Sparkline([])
        yield Static("", classes="value")

    def draw(self, values: list[float]) -> None:
        """values: those that are known, oldest first."""
        self.query_one(Sparkline).data = values
        self.query_one(".value", Static).update(Text(number(values[-1] if values else None)))
