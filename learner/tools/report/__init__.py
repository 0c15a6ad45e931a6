"""gleaner report: makes a page of a run from the files in `page/`. This module has only the command line of the
command, so that it can be imported without the modules that write.py needs."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from learner.driver import process
from learner.main import Request, epilog, natural
from learner.tools.sweep import FILE as SWEEP


@dataclass(frozen=True, slots=True)
class ReportRequest(Request):
    """Show a run as a page for the browser, or in the terminal.

    One HTML file that needs no network: curves, memory planned and measured, every completion. With --live it follows
    a run that trains.
    """

    EPILOG = epilog(
        "gleaner report runs/demo-seed0",
        "gleaner report runs/demo-seed0 --against runs/demo-seed1 --out both.html",
        "gleaner report runs/demo-seed0 --live",
        "gleaner report runs/demo-seed0 --terminal",
        "gleaner report runs/my-sweep",
        failed="the page could not be written or served",
    )

    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run's folder, or a sweep's; the run may still be going on.")
    ]
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The page; else report.html in RUN.")] = None
    against: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Another run, whose curves and settings stand beside it.")
    ] = None
    live: Annotated[bool, typer.Option("--live", help="Serve it to browsers of this machine until Ctrl-C.")] = False
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Show it in this terminal, without a browser; it follows the run, too.")
    ] = False
    port: Annotated[
        int | None,
        typer.Option(parser=natural, metavar="N", help="Of --live; where it is not given, any that is free."),
    ] = None
    limit: Annotated[
        str, typer.Option(metavar="SIZE", help="The most that completions may take; of more, a sample of steps.")
    ] = "64MiB"


def run(asked: ReportRequest) -> int:
    """Exit code: 0; 1 where the page cannot be written or served; 2 where something given is wrong."""
    process.streams_are_commentary()
    if wrong := _wrong(asked):
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    if (asked.run / SWEEP).is_file():
        from learner.tools.sweep.report import write_report

        return write_report(asked.run, asked.out)
    if asked.terminal:
        return _in_terminal(asked.run)
    from learner.tools.report import write
    from rollout.config import parse_size

    try:
        size = parse_size(asked.limit)
    except ValueError as error:
        print(f"error: --limit: {error}", file=sys.stderr)
        return 2
    if asked.live:
        return write.serve(asked.run, asked.against, size, asked.port or 0)
    return write.report(asked.run, asked.out, asked.against, size)


def _in_terminal(run: Path) -> int:
    try:
        from learner.tools.terminal import show
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        print("error: --terminal needs textual: pip install 'gleaner-rl[terminal]'", file=sys.stderr)
        return 1
    return show(run)


def _wrong(asked: ReportRequest) -> str:
    """Returns a sentence about options that do not go together, or ''."""
    of_run = {"--against": asked.against is not None, "--live": asked.live, "--terminal": asked.terminal}
    if (asked.run / SWEEP).is_file() and (wrong := [name for name, given in of_run.items() if given]):
        return f"{wrong[0]}: is of a single run, and {asked.run} is a sweep's folder; give one of the folders in it"
    of_page = {"--out": asked.out is not None, "--against": asked.against is not None, "--live": asked.live}
    if asked.terminal and (wrong := [name for name, given in of_page.items() if given]):
        return f"{wrong[0]}: is of the page, and does not go with --terminal; leave one out"
    if asked.live and asked.out is not None:
        return "--out: does not go with --live, which writes no file; leave one out"
    if asked.port is not None and not asked.live and not asked.terminal:
        return "--port: is of --live; give that as well, or leave it out"
    return ""
