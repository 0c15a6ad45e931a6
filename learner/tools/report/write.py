"""`gleaner report`: the page of a run, into a file, or served while it trains."""

import os
import sys
import time
from pathlib import Path

from cluster import run_lock
from cluster.files import writing
from learner.driver.console import escaped
from learner.tools.report.build import blocks_of
from learner.tools.report.live import LiveServer, Watched
from learner.tools.report.page import page
from learner.tools.report.run_folder import ReportError, begun

LOOK_S = 0.5  # between two looks at a run that has no step yet


def report(run: Path, out: Path | None, against: Path | None, limit: int) -> int:
    """Writes the page of the run folder `run` and says where: to `out`, or report.html in that folder.

    against: another run folder to compare with. limit: bytes of packed completions. Returns the exit code: 0, 1 where
    the page cannot be written, 2 where there is nothing to report on.
    """
    target = run / "report.html" if out is None else out
    try:
        title, blocks = blocks_of(run, against, limit)
    except (OSError, ReportError) as error:
        return _failed(error, 2)
    partial = target.with_name(target.name + ".partial")
    try:
        with writing(partial):
            partial.unlink(missing_ok=True)  # in a folder of others it may be a link, or a FIFO
            with partial.open("x", encoding="utf-8", newline="\n") as file:
                file.writelines(page(title, blocks))
            os.replace(partial, target)
    except OSError as error:
        return _failed(f"--out: {target} cannot be written ({error.strerror}); give another file", 1)
    print(f"report   {escaped(str(target))}")
    return 0


def serve(run: Path, against: Path | None, limit: int, port: int) -> int:
    """Serves the page to browsers of this machine until Ctrl-C, once the run has something to show. port: 0 for any
    that is free. Exit codes as above; 1 where the port is taken."""
    try:
        _wait_for_first_step(run)
        watched = Watched(run, against, limit)
    except (OSError, ReportError) as error:
        return _failed(error, 2)
    except KeyboardInterrupt:
        return 0
    try:
        server = LiveServer(watched, port)
    except (OSError, OverflowError) as error:
        return _failed(f"--port: must be one that is free, got {port}: {error}", 1)
    with server:
        print(f"report   {server.address}   (for this machine only; Ctrl-C ends it, and not the run)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _wait_for_first_step(run: Path) -> None:
    """Of a run that is starting: its folder is locked, and nothing else is there yet. Ctrl-C ends the waiting."""
    if run_lock.is_held(run) and not begun(run):
        print(f"waiting for the first step of {run}; Ctrl-C ends the waiting, and not the run", flush=True)
        while run_lock.is_held(run) and not begun(run):
            time.sleep(LOOK_S)


def _failed(error: object, code: int) -> int:
    print(f"error: {escaped(str(error))}", file=sys.stderr)
    return code
