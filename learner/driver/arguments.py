"""A command declares what it takes as a dataclass. Typer's command is made of that here, and a wrong command line is
told in one sentence."""

import difflib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import typer
from typer.core import TyperGroup
from typer.main import get_command

HELP = {"help_option_names": ["-h", "--help"]}


class Request:
    """A command takes this. Each subclass is a frozen dataclass: its fields, with `Annotated[..., typer.Option(...)]`
    and defaults, are the parameters, and its docstring is the command's help.

    Attributes:
        EPILOG: stands at the end of the help; `epilog` makes it.
        CONTEXT: settings of the command's typer.Context.
    """

    __slots__ = ()
    EPILOG: ClassVar[str] = ""
    CONTEXT: ClassVar[dict[str, Any]] = {}


Asked = TypeVar("Asked", bound=Request)


def command_of(request: type[Asked], run: Callable[[Asked], int], name: str) -> Any:
    """Typer's command of that name: it calls `run` with what the command line says, and returns the exit code."""

    def command(**given: Any) -> int:
        return run(request(**given))

    command.__doc__ = request.__doc__
    signature = inspect.signature(request)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name, epilog=request.EPILOG, context_settings=HELP | request.CONTEXT)(command)
    return get_command(app)


def answer(command: Any, argv: Sequence[str] | None, name: str) -> int:
    """The exit code of `command` with these words, or those of this process; `name` is what its help calls it. It is 2
    for a wrong command line, of which a sentence is printed, and 130 after Ctrl-C."""
    try:
        code = command.main(None if argv is None else list(argv), prog_name=name, standalone_mode=False)
    except typer.TyperException as error:
        print(f"error: {sentence(error, name)}", file=sys.stderr)
        return error.exit_code
    return int(code or 0)


# Numbers, each with its range, as texts or as the defaults that stand for them. All raise ValueError, which Typer shows
# beside the option's name.


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


def sentence(error: typer.TyperException, program: str) -> str:
    """What is wrong, without the usage around it. program: its name, for an error that does not say which command."""
    ctx, param = getattr(error, "ctx", None), getattr(error, "param", None)
    text = " ".join(error.message.split()).removeprefix("Value error, ").rstrip(".")
    if param is not None:
        name = max(param.opts, key=len) if param.param_type_name == "option" else param.display_name_raw
        return f"{name}: {text[:1].lower()}{text[1:]}" if text else f"{name}: required, but not given"
    where = program if ctx is None else ctx.command_path
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
