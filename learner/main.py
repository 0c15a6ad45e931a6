"""The command `gleaner train`, or `python -m learner.main`: parses the command line, checks the inputs, runs. The first
part is what all of gleaner's commands use for their command lines."""

import asyncio
import difflib
import inspect
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, TypeVar

import typer
from typer.core import TyperGroup
from typer.main import get_command

from learner.driver import process

if TYPE_CHECKING:
    from learner.config import RunConfig
    from learner.config.load import WrongSettings
    from learner.driver.memory import Cards

# A command declares its parameters as a dataclass, from which `command_of` makes Typer's command.

HELP = {"help_option_names": ["-h", "--help"]}


class Request:
    """The parameters of a command. Each subclass is a frozen dataclass: its fields, with
    `Annotated[..., typer.Option(...)]` and defaults, are the parameters, and its docstring is the command's help.

    Attributes:
        EPILOG: text at the end of the help; `epilog` makes it.
        CONTEXT: settings of the command's typer.Context.
    """

    __slots__ = ()
    EPILOG: ClassVar[str] = ""
    CONTEXT: ClassVar[dict[str, Any]] = {}


Asked = TypeVar("Asked", bound=Request)


def command_of(request: type[Asked], run: Callable[[Asked], int], name: str) -> Any:
    """Typer's command of that name. It calls `run` with the command line's request, and returns the exit code."""

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
    """Runs a command with the words `argv`, or those of this process, and returns its exit code: 2 for a wrong command
    line, about which a sentence is printed, and 130 after Ctrl-C. name: the command's name in its help."""
    try:
        code = command.main(None if argv is None else list(argv), prog_name=name, standalone_mode=False)
    except typer.TyperException as error:
        print(f"error: {sentence(error, name)}", file=sys.stderr)
        return error.exit_code
    return int(code or 0)


# Parsers of numbers with a range, for Typer, which passes texts and defaults. They raise ValueError, which Typer shows
# beside the option's name.


def natural(text: str | int) -> int:
    """Parses a whole number from 0."""
    return _whole(text, 0)


def positive(text: str | int) -> int:
    """Parses a whole number from 1."""
    return _whole(text, 1)


def rate(text: str | float) -> float:
    """Parses a finite number above 0."""
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


# The sentence about a wrong command line: field, rule, value, next step, as in every error of gleaner.


def sentence(error: typer.TyperException, program: str) -> str:
    """The error as one sentence, without Typer's text on usage. program: the name to show if the error has none."""
    ctx, param = getattr(error, "ctx", None), getattr(error, "param", None)
    text = " ".join(error.message.split()).removeprefix("Value error, ").rstrip(".")
    if param is not None:
        name = max(param.opts, key=len) if param.param_type_name == "option" else param.display_name_raw
        return f"{name}: {text[:1].lower()}{text[1:]}" if text else f"{name}: required, but not given"
    where = program if ctx is None else ctx.command_path
    near = getattr(error, "possibilities", None) or ()
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{where}: {text}{hint}"


# The end of every --help: examples to copy, and the exit codes.


def epilog(*examples: str, failed: str = "it failed") -> str:
    """The text that ends a command's help. failed: the meaning of exit code 1. The \\b makes Typer keep line breaks."""
    lines = "\n".join(f"  {example}" for example in examples)
    return f"\b\nExamples:\n{lines}\n\nExit codes: 0 done, 1 {failed}, 2 the input is wrong."


# Groups of commands: the error for a word that is no command names all commands and the nearest one.

SHOWN = 40  # most characters of a wrong word that an error shows


class Commands(TyperGroup):
    """A group of commands, such as `gleaner`, whose name must be followed by that of one of its commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Typer's, but for an error if no command follows the group's name."""
        if not args and not ctx.resilient_parsing:  # resilient parsing is how a shell asks for completions
            ctx.fail(self._must_follow("nothing"))
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Typer's, but for an error that suggests a command if the first word is none."""
        word = args[0]
        if word not in self.commands and not word.startswith("-"):
            near = difflib.get_close_matches(word, self.commands, n=1)
            hint = f"; did you mean {ctx.command_path} {near[0]}?" if near else f"; {ctx.command_path} --help says more"
            ctx.fail(self._must_follow(word[:SHOWN]) + hint)
        return super().resolve_command(ctx, args)

    def _must_follow(self, given: str) -> str:
        *others, last = self.commands
        return f"must be followed by {' or '.join(filter(None, [', '.join(others), last]))}, got {given}"


def _key_names(incomplete: str) -> list[str]:
    from learner.config.load import keys

    return [f"{key.name}=" for key in keys() if key.name.startswith(incomplete)]


@dataclass(frozen=True, slots=True)
class RunRequest(Request):
    """Train a model on your own reward.

    python -m learner.main is the same. The same command goes on where a run stopped; Ctrl-C once ends it after the
    step, with a checkpoint.
    """

    EPILOG = epilog(
        "gleaner train --config my.yaml --dry-run",
        "gleaner train --config my.yaml learner.lora.rank=32 seed=1",
        "gleaner train --config my.yaml --dry-run --assume-gpus 2xh100",
        "gleaner train --keys | grep memory",
        failed="the run failed",
    )
    CONTEXT: ClassVar = {"ignore_unknown_options": True}  # --a.b=1 is taken like a.b=1

    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings that replace the file's, items of a list by their index: rewards.0.weight=2. --keys lists "
            "all, docs/keys.md explains them.",
            autocompletion=_key_names,
        ),
    ] = None
    config: Annotated[str | None, typer.Option(metavar="FILE", help="The YAML file of the run; see configs/.")] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print placement and notes, start nothing.")
    ] = False
    assume_gpus: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --dry-run: check as if cards were here: h100, 80GiB, 2x24GiB."),
    ] = None
    verbose: Annotated[bool, typer.Option("--verbose", help="With --dry-run: print every setting, too.")] = False
    keys: Annotated[bool, typer.Option("--keys", help="List every key with its choices and default.")] = False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `gleaner train` with the words `argv`, or those of this process, and returns the exit code of `run`."""
    process.keep_streams()
    process.ours_first()
    return answer(command_of(RunRequest, run, "train"), argv, "learner.main")


def run(asked: RunRequest) -> int:
    """Does what the command line asks for. Returns the exit code: 0 done or stopped with a checkpoint, 1 the run
    failed, 2 the configuration or its inputs are wrong, 130 stopped by a signal before the run began, or at once by a
    second Ctrl-C."""
    return guarded(lambda: _run(asked), "the run")


def guarded(work: Callable[[], int], what: str) -> int:
    """Does the work of a command that trains, in a place where it can, and returns its exit code, or 130 if a signal
    stops it before `what` began."""
    try:
        with process.interrupting():
            if wrong := process.hidden_package() or process.wrong_place():
                print(f"error: {wrong}", file=sys.stderr)
                return 2
            return work()
    except KeyboardInterrupt:  # a run that has begun is stopped by learner.driver.launch, with a checkpoint
        print(f"stopped before {what} began", file=sys.stderr)
        return 130


def concluded(work: Callable[[], int], last: str) -> int:
    """Does work that may start a run, and returns its exit code; prints the error that ended it. Raises
    KeyboardInterrupt if a signal ended it before it began. last: what the same command goes on from."""
    from cluster.errors import WrongInput
    from learner.driver import failure

    try:
        return work()
    except SystemExit as error:  # while Ray starts, SIGTERM raises SystemExit
        raise KeyboardInterrupt from error
    except asyncio.CancelledError as error:  # a second Ctrl-C in a run, or a signal during its start
        begun = f"stopped at once; the same command goes on from {last}"
        print(f"stopped {error.args[0]}" if error.args else begun, file=sys.stderr)
        return 130
    except (Exception, BaseExceptionGroup) as several:
        cause = failure.first_of(several)
        if isinstance(cause, WrongInput):  # some mistakes show only on the nodes of a cluster that was joined
            print(f"error: {cause}".replace("\n", "\nerror: "), file=sys.stderr)
            return 2
        return _fail(cause)


def _run(asked: RunRequest) -> int:
    """As `run`, which has checked that imports find gleaner's own packages. Raises KeyboardInterrupt if a signal asks
    the run to end before it has begun."""
    from cluster.errors import WrongInput  # imported here and below, once it is known that our packages are ours
    from learner.config import load
    from learner.driver import memory as known_cards

    if asked.keys:
        print(load.describe())
        return 0
    if asked.config is None and not asked.overrides:
        print("config: --config: required, but not given; gleaner init my-run writes a first one", file=sys.stderr)
        return 2
    try:
        assumed = known_cards.cards_of(asked.assume_gpus) if asked.assume_gpus is not None else None
    except WrongInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        config = load.load_config(asked.config, asked.overrides or (), None if assumed is None else assumed.count)
    except WrongInput as error:
        print(f"config: {error}".replace("\n", "\nconfig: "), file=sys.stderr)
        if isinstance(error, load.WrongSettings):
            _tell_more(error, assumed)
        return 2
    if assumed is not None and not asked.dry_run:
        print("error: --assume-gpus: a run needs the cards themselves; give it with --dry-run", file=sys.stderr)
        return 2
    if asked.verbose and not asked.dry_run:
        print("error: --verbose: is of --dry-run; a run writes its settings to config.yaml", file=sys.stderr)
        return 2
    from rollout.data import model_files

    model = config.model
    model_files.settle([model.path, model.reference, model.teacher, config.data.path, config.data.eval.path])
    return concluded(
        lambda: _dry_run(config, assumed, verbose=asked.verbose) if asked.dry_run else _train(config),
        "its last checkpoint",
    )


def _tell_more(wrong: "WrongSettings", cards: "Cards | None") -> None:
    """Prints further mistakes: those in files, columns and reward functions that the valid settings name. cards: those
    of --assume-gpus."""
    if (others := wrong.others()) is None:
        return
    from cluster.errors import WrongInput
    from learner.driver.preflight import look
    from rollout.data import model_files

    config, sections = others
    model_files.settle([config.model.path, config.data.path, config.data.eval.path])
    try:
        look(config, cards, sections=sections).finish()
    except WrongInput as error:
        print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
    except Exception as error:  # an incomplete configuration may fail in any way, and the mistakes are printed already
        logging.getLogger("learner").debug("the other settings could not be looked at: %r", error)


def _dry_run(config: "RunConfig", cards: "Cards | None", *, verbose: bool) -> int:
    from learner.driver import machine_checks, preflight

    prepared = preflight.rehearse(config, cards)
    on_nodes = [] if cards is not None else asyncio.run(machine_checks.rehearse_nodes(prepared))
    print(preflight.report(prepared, cards, on_nodes, verbose=verbose))
    return 0


def _train(config: "RunConfig") -> int:
    from learner.driver.preflight import look

    process.streams_are_commentary()
    first = look(config)
    if first.wrong:
        first.finish()
    from cluster import files
    from learner.driver import launch, preflight

    with files.lock_held(first.config.run_dir):
        return asyncio.run(launch.run(preflight.prepare_rest(first)))


def _fail(error: BaseException) -> int:
    """Prints the error, with its traceback where that helps and its sentence last; returns the exit code."""
    from cluster.actor import ClusterLost
    from learner.driver import failure

    text, code = failure.tell(error)
    print(text, file=sys.stderr, flush=True)
    if isinstance(error, ClusterLost):
        leave(code)  # after the loss of a part of Ray, its threads in this process would crash at the normal exit
    return code


def leave(code: int) -> NoReturn:
    """Ends the process without the interpreter's own end. To be called when all files are closed and all child
    processes have ended."""
    process.end_unheard()
    # sys.exit would take half a second to undo imports. By then Python has given signals back to the system: a second
    # SIGTERM in that time would make -15 of a 0, and after the loss of a part of Ray its threads make it -11.
    os._exit(process.streams_outcome(code))


if __name__ == "__main__":
    process.end_as_command()
    leave(main())
