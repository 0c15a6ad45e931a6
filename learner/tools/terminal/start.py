"""`gleaner report RUN --terminal`."""

import sys
from pathlib import Path

from learner.tools.report.run_folder import ReportError, read_run


def show(run: Path) -> int:
    """Until its user leaves. Exit code: 0; 1 without textual or without a terminal; 2 where there is nothing to
    show."""
    try:
        read_run(run)
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        from learner.tools.terminal.app import RunApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        print("error: --terminal needs textual: pip install 'gleaner-rl[terminal]'", file=sys.stderr)
        return 1
    if not sys.stdout.isatty():
        print("error: --terminal: must be a terminal, and the output goes elsewhere; leave it out", file=sys.stderr)
        return 1
    return RunApp(run).run() or 0
