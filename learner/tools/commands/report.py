"""gleaner report."""

from pathlib import Path
from typing import Annotated

import typer

from learner.driver import process
from learner.tools.arguments import epilog, natural

EPILOG = epilog(
    "gleaner report runs/demo-seed0",
    "gleaner report runs/demo-seed0 --against runs/demo-seed1 --out both.html",
    "gleaner report runs/demo-seed0 --live",
    "gleaner report runs/demo-seed0 --terminal",
    failed="the page could not be written or served",
)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder; the run may still be going on.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page; else report.html in RUN.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Another run, whose curves and settings stand beside it.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Serve it to browsers of this machine until Ctrl-C.")] = False,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show it in this terminal, without a browser; it follows the run, too.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(parser=natural, metavar="N", help="Of --live; where it is not given, any that is free."),
    ] = None,
    limit: Annotated[
        str, typer.Option(metavar="SIZE", help="The most that completions may take; of more, a sample of steps.")
    ] = "64MiB",
) -> int:
    """Show a run as a page for the browser, or in the terminal.

    One HTML file that needs no network: curves, memory planned and measured, every completion. With --live it follows
    a run that trains.
    """
    process.streams_are_commentary()
    if terminal:
        return _in_terminal(run, out, against, live=live)
    from learner.tools.report.write import report as write
    from learner.tools.report.write import serve
    from rollout.config import parse_size

    try:
        size = parse_size(limit)
    except ValueError as error:
        typer.echo(f"error: --limit: {error}", err=True)
        return 2
    if live and out is not None:
        typer.echo("error: --out: does not go with --live, which writes no file; leave one out", err=True)
        return 2
    if port is not None and not live:
        typer.echo("error: --port: is of --live; give that as well, or leave it out", err=True)
        return 2
    return serve(run, against, size, port or 0) if live else write(run, out, against, size)


def _in_terminal(run: Path, out: Path | None, against: Path | None, *, live: bool) -> int:
    from learner.tools.report.write import show

    given = {"--out": out is not None, "--against": against is not None, "--live": live}
    for name in (name for name, wanted in given.items() if wanted):
        typer.echo(f"error: {name}: is of the page, and does not go with --terminal; leave one out", err=True)
        return 2
    return show(run)
