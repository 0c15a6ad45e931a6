"""gleaner init."""

from pathlib import Path
from typing import Annotated

import typer

from learner.driver import process
from learner.tools.arguments import epilog

EPILOG = epilog(
    "gleaner init my-run && cd my-run && gleaner train --config config.yaml",
    "gleaner init my-run --model Qwen/Qwen2.5-0.5B-Instruct",
    failed="it failed on the way",
)


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write; it is made.")] = Path(),
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Hub name or folder; else the demo's model, which runs on a CPU.")
    ] = None,
) -> int:
    """Write the files of a first run.

    They are a commented configuration, a reward function and eight rows of data. Nothing that is there is overwritten.
    """
    from learner.tools.init import InitError, write

    process.streams_are_commentary()
    try:
        print(write(folder, model))
    except InitError as error:
        typer.echo(f"error: {error}", err=True)
        return 2
    return 0
