"""Numbers of the command line, each with its range, as texts or as the defaults that stand for them. All raise
ValueError, which Typer shows beside the option's name.
"""

import difflib
import math
from typing import Any

import typer
from typer.core import TyperGroup


def natural(text: str | int) -> int:
    """A whole number from 0."""
    return _whole(text, 0)


def positive(text: str | int) -> int:
    """A whole number from 1."""
    return _whole(text, 1)


def rate(text: str | float) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(f"must be a finite number above 0, got {str(text)[:40]!r}")
    return number


def _whole(given: str | int, least: int) -> int:
    text = str(given)
    if not text.isdecimal() or len(text) > 9 or int(text) < least:
        raise ValueError(f"must be a whole number from {least} to 999999999, got {text[:40]!r}")
    return int(text)


# A wrong command line in one sentence, as every error of gleaner: field, rule, value, next step.


def sentence(error: typer.TyperException) -> str:
    """What is wrong, without the usage around it."""
    ctx, param = getattr(error, "ctx", None), getattr(error, "param", None)
    text = " ".join(error.message.split()).removeprefix("Value error, ").rstrip(".")
    if param is not None:
        name = max(param.opts, key=len) if param.param_type_name == "option" else param.display_name_raw
        return f"{name}: {text[:1].lower()}{text[1:]}" if text else f"{name}: required, but not given"
    where = "gleaner" if ctx is None else ctx.command_path
    near = getattr(error, "possibilities", None) or ()
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{where}: {text}{hint}"


# What ends every --help: examples to copy, and the exit codes.


def epilog(*examples: str, failed: str = "it failed") -> str:
    """`failed`: what exit code 1 means. The \\b keeps the line breaks."""
    lines = "\n".join(f"  {example}" for example in examples)
    return f"\b\nExamples:\n{lines}\n\nExit codes: 0 done, 1 {failed}, 2 the input is wrong."


# gleaner and its groups of commands: of a word that is none, what there is and what is nearest.

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
