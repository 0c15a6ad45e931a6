"""Runs a function that is not trusted to end, under a deadline, in a copy of this process that can be killed."""

import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from rewards.worker import signal_at_end_of_parent

MORE_BYTES = 2**30  # of memory that the copy may take beyond what this process has


def fails_within(seconds: float, function: Callable[[], object]) -> str:
    """What is wrong if `function` does not come to an end in `seconds`, or its process dies; '' else.

    What it returns or raises is ignored. It must not use threads of this process: the copy has none.
    """
    context = multiprocessing.get_context("fork")  # a new interpreter would take seconds to know what is known here
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, os.getpid(), function), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return f"did not come to an end within {seconds:g} s"
        ours.recv()
        return ""
    except EOFError:
        process.join()
        return f"ended its process (exit code {process.exitcode})"
    finally:
        process.kill()
        process.join()
        ours.close()


def _run(answer: Connection, parent: int, function: Callable[[], object]) -> None:
    signal_at_end_of_parent(signal.SIGKILL)  # with which the run's lock, whose descriptor it has, too, is let go
    if os.getppid() != parent:
        os._exit(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        function()
    except Exception as error:
        answer.send(type(error).__name__)
    else:
        answer.send("done")
