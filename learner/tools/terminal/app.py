"""The first screen: curves, the steps (newest first), and the groups of the step that is chosen."""

import asyncio
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.widgets import DataTable, Footer, Input, Static

from learner.driver.console import escaped, sentence
from learner.tools.report.run_folder import ReportError, Run, read_run
from learner.tools.report.starts import starts_of
from learner.tools.rollouts import RolloutsError
from learner.tools.terminal.curves import Curves, number
from learner.tools.terminal.group_screen import GroupScreen
from learner.tools.terminal.groups import ORDERS, Listed, groups_of, listed

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
        except (OSError, ReportError) as error:
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
            except RolloutsError as error:
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
