"""`gleaner report RUN --terminal`: a run's curves, steps and completions in a terminal."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Sparkline, Static

from cluster.errors import WrongInput
from learner.driver.console import escaped, sentence
from learner.tools.completions_shown import of_group, rows_of
from learner.tools.report.summary import Run, is_score, read_run, starts_of

# The curves of a run as one line each.


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


# The groups of a step: which are listed, and in which order.

ORDERS = ("as trained", "lowest reward", "highest reward", "widest spread")


@dataclass(frozen=True, slots=True)
class Listed:
    """A group. rows: its completions (learner.tools.completions_shown.rows_of). rewards: of those that have one."""

    rows: list[dict[str, Any]]
    rewards: list[float]

    @property
    def problem(self) -> str:
        """Its id."""
        return str(self.rows[0]["problem_id"])

    @property
    def asked(self) -> str:
        """The last message of the prompt, in one line."""
        content = self.rows[0]["prompt"][-1].get("content") if self.rows[0]["prompt"] else ""
        return " ".join(str(content).split())

    @property
    def failed(self) -> int:
        """Completions that a reward function or the environment failed on."""
        return sum(row["reward_status"] not in ("ok", "none") for row in self.rows)


def groups_of(file: Path) -> list[Listed]:
    """Of a step file, in its order. Raises WrongInput."""
    groups = [list(rows) for _, rows in groupby(rows_of(file), key=lambda row: row["group_id"])]
    return [Listed(rows, [float(row["reward"]) for row in rows if row["reward"] is not None]) for rows in groups]


def listed(groups: list[Listed], words: str, order: str, *, failed: bool) -> list[Listed]:
    """Those with the words in the problem's id or its prompt. order: one of ORDERS; groups without a reward come last.
    failed: only those with a completion that failed."""
    sought = words.lower().strip()
    found = [one for one in groups if sought in f"{one.problem} {one.asked}".lower() and (one.failed or not failed)]
    keys: dict[str, Callable[[Listed], float]] = {
        "lowest reward": lambda one: fmean(one.rewards),
        "highest reward": lambda one: -fmean(one.rewards),
        "widest spread": lambda one: min(one.rewards) - max(one.rewards),
    }
    if order not in keys:
        return found
    return sorted(found, key=lambda one: keys[order](one) if one.rewards else float("inf"))


# One group on the whole screen: its prompt, and its completions side by side.


class GroupScreen(Screen[int]):
    """Of the groups of a list, one after the other; leaves with the place of the last one that was shown."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,q", "leave", "List"),
        ("n", "move(1)", "Next group"),
        ("p", "move(-1)", "Previous"),
    ]
    CSS = "GroupScreen .title { background: $primary-muted; }"

    def __init__(self, step: int, groups: list[Listed], place: int) -> None:
        super().__init__()
        self._step, self._groups, self._place = step, groups, place

    def compose(self) -> ComposeResult:
        yield Static(classes="title")
        with VerticalScroll():
            yield Static(id="group")
        yield Footer()

    def on_resize(self, event: Resize) -> None:
        """How many stand beside each other depends on it."""
        self._draw(event.size.width)

    def action_move(self, by: int) -> None:
        """To another group of the list."""
        self._place = min(max(self._place + by, 0), len(self._groups) - 1)
        self._draw(self.size.width)
        self.query_one(VerticalScroll).scroll_home(animate=False)

    def action_leave(self) -> None:
        """Back to the list."""
        self.dismiss(self._place)

    def _draw(self, width: int) -> None:
        one = self._groups[self._place]
        title = f"step {self._step}  problem {escaped(one.problem)}  {self._place + 1} of {len(self._groups)}"
        self.query_one(".title", Static).update(Text(title, no_wrap=True))
        self.query_one("#group", Static).update(of_group(one.rows, width - 2))


# The first screen: curves, the steps (newest first), and the groups of the step that is chosen.

EVERY_S = 2.0
STEPS = {
    "reward/mean": "reward", "eval/accuracy": "accuracy", "rollout/completion_length": "length",
    "policy/entropy": "entropy", "time/step": "s",
}  # fmt: skip
GROUPS = ("problem", "reward", "least", "most", "failed", "prompt")
WIDE = 200  # characters of a prompt


class RunApp(App[int]):
    """Follows a run folder. Everything out of it is shown as text: neither markup nor control characters are obeyed."""

    TITLE = "gleaner"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        ("slash", "search", "Search"),
        ("o", "order", "Order"),
        ("f", "failed", "Failed only"),
        ("escape", "groups", "Groups"),
    ]
    CSS = """
    #steps { width: 53; }
    #groups { width: 1fr; }
    #remarks { height: auto; max-height: 4; color: $text-warning; }
    #time { height: auto; max-height: 4; color: $text-muted; }
    #told { height: auto; max-height: 4; color: $text-muted; }
    DataTable { height: 1fr; }
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder, self._files = folder, dict[int, Path]()
        self._rows: dict[int, list[float | None]] = {}  # of the steps, as they are shown
        self._step: int | None = None  # whose groups are listed
        self._groups: list[Listed] = []
        self._shown: list[Listed] = []
        self._order, self._failed = ORDERS[0], False

    def compose(self) -> ComposeResult:
        yield Static(id="run")
        yield Static(id="remarks")
        yield Static(id="time")
        yield Curves()
        with Horizontal():
            yield DataTable[Text](id="steps", cursor_type="row")
            yield DataTable[Text](id="groups", cursor_type="row")
        yield Input(placeholder="words of the prompt, or the problem's id", id="search", compact=True)
        yield Static(id="told")
        yield Footer()

    async def on_mount(self) -> None:
        """What is there now, and every two seconds what has come."""
        self.query_one("#steps", DataTable).add_columns("step", *STEPS.values())
        self.query_one("#groups", DataTable).add_columns(*GROUPS)
        self.query_one("#steps").focus()
        await self.look()
        self.set_interval(EVERY_S, self.look)

    async def look(self) -> None:
        """Reads the folder; a step that is being written is shown when it is whole."""
        try:
            run = await asyncio.to_thread(read_run, self._folder)
        except (OSError, WrongInput) as error:
            self._tell(str(error))
            return
        self._files = {int(file.stem.removeprefix("step-")): file for file in run.rollouts}
        done = f"{run.name}  step {run.steps[-1] if run.steps else 0} of {run.of or '?'}"
        if not self.query("#run"):  # it ends, and its screen is empty already
            return
        self.query_one("#run", Static).update(Text(escaped(done), style="bold", no_wrap=True))
        spent = [f"{start.steps}  {sentence(start.phases)}" for start in reversed(starts_of(run))]
        for place, said in (("#remarks", " ".join(run.remarks)), ("#time", "\n".join(spent))):
            box = self.query_one(place, Static)
            box.display = bool(said)
            box.update(Text(escaped(said)))
        await self.query_one(Curves).draw(run)
        self._list_steps(run)

    def _list_steps(self, run: Run) -> None:
        """The step that was chosen stays chosen; the newest, if none or the newest was."""
        table = self.query_one("#steps", DataTable)
        steps = sorted({*run.steps, *self._files}, reverse=True)
        place = {step: i for i, step in enumerate(run.steps)}
        rows = {
            step: [None if step not in place or n not in run.metrics else run.metrics[n][place[step]] for n in STEPS]
            for step in steps
        }
        if rows == self._rows:
            return
        self._rows = rows
        kept = self._step if table.cursor_row > 0 and self._step in steps else None
        table.clear()
        for step, values in rows.items():
            table.add_row(Text(str(step)), *(Text(number(value)) for value in values), key=str(step))
        table.move_cursor(row=0 if kept is None else steps.index(kept))

    async def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Another step: its groups."""
        if event.data_table.id != "steps" or event.row_key.value is None:
            return
        step = int(event.row_key.value)
        if step == self._step and self._groups:
            return
        self._step, self._groups = step, []
        if step in self._files:
            try:
                self._groups = await asyncio.to_thread(groups_of, self._files[step])
            except WrongInput as error:
                self._tell(str(error))
        self._list_groups()

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Enter: from a step to its groups, from a group to its completions."""
        if event.data_table.id == "steps":
            self.action_groups()
        elif self._shown and self._step is not None:
            self.push_screen(GroupScreen(self._step, self._shown, event.cursor_row), self._back)

    def _back(self, place: int | None) -> None:
        self.query_one("#groups", DataTable).move_cursor(row=place)

    def on_input_changed(self) -> None:
        """At every letter."""
        self._list_groups()

    def on_input_submitted(self) -> None:
        """To what was found."""
        self.action_groups()

    def action_groups(self) -> None:
        """Out of the search or the steps."""
        self.query_one("#groups").focus()

    def action_search(self) -> None:
        """By words."""
        self.query_one("#search").focus()

    def action_order(self) -> None:
        """The next one."""
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self._list_groups()

    def action_failed(self) -> None:
        """Only groups with a completion that failed, or all again."""
        self._failed = not self._failed
        self._list_groups()

    def _list_groups(self) -> None:
        table = self.query_one("#groups", DataTable)
        words = self.query_one("#search", Input).value
        self._shown = listed(self._groups, words, self._order, failed=self._failed)
        table.clear()
        for one in self._shown:
            table.add_row(*(Text(cell, no_wrap=True) for cell in _cells(one)))
        failing = ", failed only" if self._failed else ""
        self._tell(f"step {self._step}: {len(self._shown)} of {len(self._groups)} groups, {self._order}{failing}")

    def _tell(self, text: str) -> None:
        if text:
            self.query_one("#told", Static).update(Text(escaped(text)))


def _cells(one: Listed) -> tuple[str, ...]:
    known = one.rewards
    rewards = [number(sum(known) / len(known)), number(min(known)), number(max(known))] if known else ["none", "", ""]
    return (escaped(one.problem), *rewards, str(one.failed or ""), escaped(one.asked[:WIDE]))


def show(run: Path) -> int:
    """Shows the run until its user leaves. Exit code: 0; 1 without a terminal; 2 where there is nothing to show."""
    try:
        read_run(run)
    except WrongInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not sys.stdout.isatty():
        print("error: --terminal: must be a terminal, and the output goes elsewhere; leave it out", file=sys.stderr)
        return 1
    return RunApp(run).run() or 0
