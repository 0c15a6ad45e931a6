"""gleaner and its groups of commands: of a word that is none, what there is and what is nearest."""

import difflib
from typing import Any

from typer.core import TyperGroup

SHOWN = 40  # characters of a wrong word


class Commands(TyperGroup):
    """A group that must be followed by one of its commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Nothing behind the group's name is a mistake."""
        if not args and not ctx.resilient_parsing:  # which is how a shell asks for completions
            ctx.fail(self._must_follow("nothing"))
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names."""
        word = args[0]
        if word not in self.commands and not word.startswith("-"):
            near = difflib.get_close_matches(word, self.commands, n=1)
            hint = f"; did you mean {ctx.command_path} {near[0]}?" if near else f"; {ctx.command_path} --help says more"
            ctx.fail(self._must_follow(word[:SHOWN]) + hint)
        return super().resolve_command(ctx, args)

    def _must_follow(self, given: str) -> str:
        *others, last = self.commands
        return f"must be followed by {' or '.join(filter(None, [', '.join(others), last]))}, got {given}"
