"""gleaner replay: computes a run's recorded steps again. This module has only the command line of the command, so that
it can be imported without the modules that command.py needs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from learner.main import (
    Request,
    epilog,
    natural,
    positive,
)


@dataclass(frozen=True, slots=True)
class ReplayRequest(Request):
    """Take a run's steps again from its recorded completions, without generating.

    With the same settings each step must lead to the policy whose digest the run recorded; the first that does not is
    shown, with its metrics beside the recorded ones. With other settings of the learner, or other rewards, it says what
    the same completions would have taught, in a folder that report and eval read.
    """

    EPILOG = epilog(
        "gleaner replay runs/demo-seed0",
        "gleaner replay runs/demo-seed0 --from 40 --to 45 --json",
        "gleaner replay runs/demo-seed0 learner.learning_rate=3e-4 --output runs/faster",
        "gleaner replay runs/demo-seed0 rewards='[{use: my_rewards.py:accuracy}]' --output runs/other-reward",
        "gleaner replay runs/demo-seed0 --bisect reward/mean",
        failed="a step came out otherwise than it was recorded, or failed",
    )

    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="What if: other settings of the learner, or other rewards."),
    ] = None
    start: Annotated[
        int, typer.Option("--from", parser=natural, metavar="STEP", help="0, or the step of a kept checkpoint.")
    ] = 0
    to: Annotated[
        int | None, typer.Option(parser=positive, metavar="STEP", help="The last one taken; else the run's last.")
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A new folder for what comes out; with other settings else RUN-replay."),
    ] = None
    bisect: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="Only say at which step this metric broke, and what changed before it."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="The result as an object.")] = False


def run(asked: ReplayRequest) -> int:
    """Exit code: 0; 1 if something differs, or failed on the way; 2 if something given is wrong."""
    from learner.tools.replay import command

    return command.run(asked)
