"""What reward functions print goes to no standard output of ours, which may be JSON, and does not flood a console."""

import io
import os
import sys

NAME = "reward_output.log"  # in a run's folder


def redirect(file: str | None) -> None:
    """Standard output and error of this process and its children go to the end of that file (None: output to where
    errors go)."""
    descriptor = 2
    if file is not None:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except OSError:  # no folder on this node, or a full disk: what is printed is no reason to end a run
            file = None
    os.dup2(descriptor, 1)
    if file is not None:
        os.dup2(descriptor, 2)
        os.close(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):  # None, where it was closed
        sys.stdout.reconfigure(line_buffering=True)  # a process that is killed would take what it holds along
