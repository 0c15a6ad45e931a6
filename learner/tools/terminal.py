"""Carries out `gleaner report RUN --terminal`: it shows a run's curves, steps and completions in a terminal
(RunApp)."""

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

CURVES = (
    "reward/mean", "eval/accuracy", "reward/failed", "rollout/completion_length", "policy/entropy", "policy/kl",
    "policy/mismatch_max", "policy/staleness_mean", "loss/grad_norm", "time/step",
)  # fmt: skip
REWARDS = 4  # most scores of reward functions that are drawn after CURVES


def names_of(run: Run) -> list[str]:
    """Returns the names of the metrics that are drawn."""
    known = [name for name in CURVES if name in run.metrics]
    own = [name for name in run.metrics if name.startswith("reward/") and is_score(name) and name not in known]
    return known + own[:REWARDS]


def number(value: float | None) -> str:
    """Returns a value as text with three digits; None becomes ""."""
    return "" if value is None else f"{value:.3g}"


class Curves(VerticalScroll, can_focus=False):
    """The curves: a line for each metric with its name, its curve and its newest value."""

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
        """Draws the curves of the run as it is now."""
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
        """Draws the known values, oldest first."""
        self.query_one(Sparkline).data = values
        self.query_one(".value", Static).update(Text(number(values[-1] if values else None)))


ORDERS = ("as trained", "lowest reward", "highest reward", "widest spread")  # orders in which groups are listed


@dataclass(frozen=True, slots=True)
class Listed:
    """A group in the list of groups of a step."""

    rows: list[dict[str, Any]]  # its completions (learner.tools.completions_shown.rows_of)
    rewards: list[float]  # the rewards of completions that have one

    @property
    def problem(self) -> str:
        """The problem's id."""
        return str(self.rows[0]["problem_id"])

    @property
    def asked(self) -> str:
        """The last message of the prompt, in one line."""
        content = self.rows[0]["prompt"][-1].get("content") if self.rows[0]["prompt"] else ""
        return " ".join(str(content).split())

    @property
    def failed(self) -> int:
        """Number of completions on which a reward function or the environment failed."""
        return sum(row["reward_status"] not in ("ok", "none") for row in self.rows)


def groups_of(file: Path) -> list[Listed]:
    """Returns the groups of a step file, in its order. Raises WrongInput."""
    groups = [list(rows) for _, rows in groupby(rows_of(file), key=lambda row: row["group_id"])]
    return [Listed(rows, [float(row["reward"]) for row in rows if row["reward"] is not None]) for rows in groups]


def listed(groups: list[Listed], words: str, order: str, *, failed: bool) -> list[Listed]:
    """Returns the groups with `words` in the problem's id or the prompt, sorted. order: one of ORDERS; groups without a
    reward come last. failed: whether only groups with a failed completion are listed."""
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


class GroupScreen(Screen[int]):
    """A screen that shows a group of a list: its prompt, and its completions side by side. Keys move to other groups of
    the list. Its result is the place in the list of the group that was shown last."""

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
        """Draws again: the number of completions side by side depends on the width."""
        self._draw(event.size.width)

    def action_move(self, by: int) -> None:
        """Shows another group of the list."""
        self._place = min(max(self._place + by, 0), len(self._groups) - 1)
        self._draw(self.size.width)
        self.query_one(VerticalScroll).scroll_home(animate=False)

    def action_leave(self) -> None:
        """Goes back to the list."""
        self.dismiss(self._place)

    def _draw(self, width: int) -> None:
        one = self._groups[self._place]
        title = f"step {self._step}  problem {escaped(one.problem)}  {self._place + 1} of {len(self._groups)}"
        self.query_one(".title", Static).update(Text(title, no_wrap=True))
        self.query_one("#group", Static).update(of_group(one.rows, width - 2))


EVERY_S = 2.0  # seconds between two looks at the folder
STEPS = {
    "reward/mean": "reward", "eval/accuracy": "accuracy", "rollout/completion_length": "length",
    "policy/entropy": "entropy", "time/step": "s",
}  # fmt: skip
GROUPS = ("problem", "reward", "least", "most", "failed", "prompt")
WIDE = 200  # most characters of a prompt


class RunApp(App[int]):
    """The app, which follows a run folder. Its first screen has curves, steps (newest first) and the groups of the
    chosen step. Content of the folder is shown as text: markup and control characters in it have no effect."""

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
        self._rows: dict[int, list[float | None]] = {}  # the values of each step in the table
        self._step: int | None = None  # the step whose groups are listed
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
        """Shows what is there, and looks again every two seconds."""
        self.query_one("#steps", DataTable).add_columns("step", *STEPS.values())
        self.query_one("#groups", DataTable).add_columns(*GROUPS)
        self.query_one("#steps").focus()
        await self.look()
        self.set_interval(EVERY_S, self.look)

    async def look(self) -> None:
        """Reads the folder and shows it; a step that is being written is shown when it is whole."""
        try:
            run = await asyncio.to_thread(read_run, self._folder)
        except (OSError, WrongInput) as error:
            self._tell(str(error))
            return
        self._files = {int(file.stem.removeprefix("step-")): file for file in run.rollouts}
        done = f"{run.name}  step {run.steps[-1] if run.steps else 0} of {run.of or '?'}"
        if not self.query("#run"):  # the app is ending, and its screen is empty already
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
        """Lists the steps. The chosen step stays chosen, unless it was the newest: then the new newest step is."""
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
        """Lists the groups of the step under the cursor."""
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
        """Goes, on Enter, from a step to its groups, or from a group to its completions."""
        if event.data_table.id == "steps":
            self.action_groups()
        elif self._shown and self._step is not None:
            self.push_screen(GroupScreen(self._step, self._shown, event.cursor_row), self._back)

    def _back(self, place: int | None) -> None:
        self.query_one("#groups", DataTable).move_cursor(row=place)

    def on_input_changed(self) -> None:
        """Lists the groups again at every letter of the search."""
        self._list_groups()

    def on_input_submitted(self) -> None:
        """Goes to the groups that were found."""
        self.action_groups()

    def action_groups(self) -> None:
        """Moves the focus to the groups."""
        self.query_one("#groups").focus()

    def action_search(self) -> None:
        """Moves the focus to the search."""
        self.query_one("#search").focus()

    def action_order(self) -> None:
        """Lists the groups in the next order."""
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self._list_groups()

    def action_failed(self) -> None:
        """Lists only groups with a failed completion, or all groups again."""
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
    """Shows the run until the user leaves. Returns the exit code: 0; 1 without a terminal; 2 with nothing to show."""
    try:
        read_run(run)
    except WrongInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not sys.stdout.isatty():
        print("error: --terminal: must be a terminal, and the output goes elsewhere; leave it out", file=sys.stderr)
        return 1
    return RunApp(run).run() or 0
