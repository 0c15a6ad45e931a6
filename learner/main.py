"""gleaner train, and python -m learner.main, which is the same: parse, check, run."""

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

# A command declares what it takes as a dataclass. Typer's command is made of that here, and a wrong command line is
# told in one sentence.

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
            "all, docs/configuration.md explains them.",
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
    """The exit code of `run` with what these words ask for, or those of this process."""
    process.keep_streams()
    process.ours_first()
    return answer(command_of(RunRequest, run, "train"), argv, "learner.main")


def run(asked: RunRequest) -> int:
    """Exit code: 0 done or stopped with a checkpoint, 1 the run failed, 2 the configuration or its inputs are wrong,
    130 stopped by Ctrl-C, or another request to end, before it began or in haste."""
    try:
        with process.interrupting():
            if wrong := process.hidden_package() or process.wrong_place():
                print(f"error: {wrong}", file=sys.stderr)
                return 2
            return _run(asked)
    except KeyboardInterrupt:  # once it has begun, learner.driver.launch stops it with a checkpoint
        print("stopped before the run began", file=sys.stderr)
        return 130


def _run(asked: RunRequest) -> int:
    """Raises KeyboardInterrupt if it is asked to end before it has begun."""
    from learner.config import load  # here and below: once it is known that our packages are ours
    from learner.driver import failure

    if asked.keys:
        print(load.describe())
        return 0
    if asked.config is None and not asked.overrides:
        print("config: --config: required, but not given; gleaner init my-run writes a first one", file=sys.stderr)
        return 2
    try:
        config = load.load_config(asked.config, asked.overrides or ())
    except load.ConfigError as error:
        print(f"config: {error}".replace("\n", "\nconfig: "), file=sys.stderr)
        if isinstance(error, load.WrongSettings):
            _tell_more(error)
        return 2
    if asked.assume_gpus is not None and not asked.dry_run:
        print("error: --assume-gpus: a run needs the cards themselves; give it with --dry-run", file=sys.stderr)
        return 2
    if asked.verbose and not asked.dry_run:
        print("error: --verbose: is of --dry-run; a run writes its settings to config.yaml", file=sys.stderr)
        return 2
    from rollout.data import model_files

    model_files.settle([config.model.path, config.model.reference, config.data.path, config.data.eval.path])
    try:
        return _dry_run(config, asked.assume_gpus, verbose=asked.verbose) if asked.dry_run else _train(config)
    except SystemExit as error:  # what SIGTERM is while Ray starts
        raise KeyboardInterrupt from error
    except asyncio.CancelledError as error:  # the second Ctrl-C of a run, or a request to end during its start
        begun = "stopped at once; the same command goes on from its last checkpoint"
        print(f"stopped {error.args[0]}" if error.args else begun, file=sys.stderr)
        return 130
    except (Exception, BaseExceptionGroup) as several:
        from cluster.errors import WrongInput

        cause = failure.first_of(several)
        if isinstance(cause, WrongInput):  # some of them only a cluster that was joined can tell
            print(f"error: {cause}".replace("\n", "\nerror: "), file=sys.stderr)
            return 2
        return _fail(cause)


def _tell_more(wrong: "WrongSettings") -> None:
    """What else is wrong: files, columns and reward functions that the other settings name."""
    if (others := wrong.others()) is None:
        return
    from cluster.errors import WrongInput
    from learner.driver.preflight import look
    from rollout.data import model_files

    config, sections = others
    model_files.settle([config.model.path, config.data.path, config.data.eval.path])
    try:
        look(config, sections=sections).finish()
    except WrongInput as error:
        print(f"error: {error}".replace("\n", "\nerror: "), file=sys.stderr)
    except Exception as error:  # what half a configuration meets must not stand before what is known to be wrong
        logging.getLogger("learner").debug("the other settings could not be looked at: %r", error)


def _dry_run(config: "RunConfig", assumed: str | None, *, verbose: bool) -> int:
    from learner.driver import memory as known_cards
    from learner.driver import preflight, roles

    cards = None if assumed is None else known_cards.cards_of(assumed)
    prepared = preflight.rehearse(config, cards)
    on_nodes = [] if cards is not None else asyncio.run(roles.rehearse_nodes(prepared))
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
    """Prints the whole traceback for debugging, and its one sentence last, where it is read first."""
    from cluster.actor import ClusterLost
    from learner.driver import failure

    text, code = failure.tell(error)
    print(text, file=sys.stderr, flush=True)
    if isinstance(error, ClusterLost):
        leave(code)  # Ray's threads in here crash on the way out, once a part of Ray is gone
    return code


def leave(code: int) -> NoReturn:
    """Ends the process, all of whose files and processes are closed, without the interpreter's own end."""
    process.end_unheard()
    # sys.exit would take half a second to undo imports. By then Python has given signals back to the system: a second
    # SIGTERM in that time would make -15 of a 0, and after the loss of a part of Ray its threads make it -11.
    os._exit(process.streams_outcome(code))


if __name__ == "__main__":
    process.end_as_command()
    leave(main())
