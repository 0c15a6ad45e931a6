"""gleaner rollouts show."""

from pathlib import Path
from typing import Annotated

import typer

from learner.tools.arguments import epilog, natural, positive

EPILOG = epilog(
    "gleaner rollouts show runs/demo-seed0",
    "gleaner rollouts show runs/demo-seed0 --step 12 --worst",
    "gleaner rollouts show runs/demo-seed0 --problem chain_sum-17 --json | jq '.[].reward'",
)


def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A run's folder, or its rollouts folder.")],
    step: Annotated[
        int | None, typer.Option(parser=positive, metavar="N", help="Of which step; else the newest.")
    ] = None,
    problem: Annotated[str | None, typer.Option(metavar="ID", help="Only the groups of this problem.")] = None,
    sample: Annotated[
        int | None, typer.Option(parser=natural, metavar="I", help="Only this completion of each group, from 0.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Only the completion with the highest reward.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Only the completion with the lowest reward.")] = False,
    groups: Annotated[
        int, typer.Option(parser=positive, metavar="N", help="How many groups to show, if none is chosen above.")
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="As a list of objects, of every group that was chosen, in ASCII.")
    ] = False,
) -> int:
    """Show completions of a run.

    As the trainer got them, with rewards, their parts, and turns; a group side by side where the terminal is wide.
    Control characters are shown, never sent to the terminal.
    """
    given = dict(locals())
    from learner.tools.rollouts import Asked, run

    return run(Asked(**given))
