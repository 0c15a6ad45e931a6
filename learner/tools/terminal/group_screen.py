"""One group on the whole screen: its prompt, and its completions side by side."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.screen import Screen
from textual.widgets import Footer, Static

from learner.driver.console import escaped
from learner.tools.rollout_view import of_group
from learner.tools.terminal.groups import Listed


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
