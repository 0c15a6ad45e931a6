"""The command line of gleaner rollouts show. completions_shown.py, which carries it out, is imported when the command
runs, so that --help is fast."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cluster.errors import WrongInput
from learner.main import (
    Request,
    epilog,
    natural,
    positive,
)


@dataclass(frozen=True, slots=True)
class RolloutsRequest(Request):
    """Show completions of a run.

    As the trainer got them, with rewards, their parts, and turns; a group side by side where the terminal is wide.
    Control characters are shown, never sent to the terminal.
    """

    EPILOG = epilog(
        "gleaner rollouts show runs/demo-seed0",
        "gleaner rollouts show runs/demo-seed0 --step 12 --worst",
        "gleaner rollouts show runs/demo-seed0 --problem chain_sum-17 --json | jq '.[].reward'",
    )

    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or its rollouts folder.")]
    step: Annotated[int | None, typer.Option(parser=positive, metavar="N", help="Of which step; else the newest.")] = (
        None
    )
    problem: Annotated[str | None, typer.Option(metavar="ID", help="Only the groups of this problem.")] = None
    sample: Annotated[
        int | None, typer.Option(parser=natural, metavar="I", help="Only this completion of each group, from 0.")
    ] = None
    best: Annotated[bool, typer.Option("--best", help="Only the completion with the highest reward.")] = False
    worst: Annotated[bool, typer.Option("--worst", help="Only the completion with the lowest reward.")] = False
    groups: Annotated[
        int, typer.Option(parser=positive, metavar="N", help="How many groups to show, if none is chosen above.")
    ] = 1
    as_json: Annotated[
        bool, typer.Option("--json", help="As a list of objects, of every group that was chosen, in ASCII.")
    ] = False

    @property
    def chooses(self) -> bool:
        """Whether the options choose certain completions, instead of the first groups."""
        return self.problem is not None or self.sample is not None or self.best or self.worst


def run(asked: RolloutsRequest) -> int:
    """Exit code: 0; 2 where there is nothing to show."""
    from learner.tools import completions_shown

    try:
        completions_shown.show(asked)
    except WrongInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
