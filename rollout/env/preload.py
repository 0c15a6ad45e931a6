"""Loaded once by the server that environments' processes are forked from, so that a new one costs milliseconds.

What goes wrong here is said by the first process that needs it: it loads the same again.
"""

import contextlib
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from multiprocessing import spawn

import rollout.env.host  # noqa: F401  (what every process needs)
from cluster.child import end_with_parent, silence
from cluster.machine import MARK, marked, sweep
from rewards.limits import lent, withhold
from rollout.env.host import found

# Ends what environments have started when the process that they are forked from is gone, however that came.
#
# The kernel ends the environments then (rewards.slot.confine), and not what they have started; and no code of the
# server's own runs where it is killed, as Ray kills what a generator leaves. So it is a process of its own, which waits
# for that. What it ends is known by a variable that each process hands on to those that it starts. Linux only.


PATIENCE_S = 5.0  # for the kernel to end them, and those that they start meanwhile


def start_sweeper() -> None:
    """In the server, before anything is forked of it."""
    server = os.getpid()
    if sys.platform != "linux" or os.fork() > 0:
        return
    try:
        _wait_for_the_end_of(server)
        sweep(partial(marked, os.environ[MARK]), PATIENCE_S)
    finally:
        os._exit(0)


def _wait_for_the_end_of(parent: int) -> None:
    os.setpgrp()  # signals to the generator's group are not for us
    silence()
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # nobody waits for our end of a pipe
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    if end_with_parent(parent, signal.SIGUSR1):
        signal.sigwait({signal.SIGUSR1})


VARIABLE = "GLEANER_ENVIRONMENT"  # for the server alone
SAFE, PATH = "PYTHONSAFEPATH", "PYTHONPATH"  # with values for its start alone


def request(code: Sequence[str], variables: Sequence[str], seconds: float) -> str:
    """What the server is to be told through VARIABLE: what names the environment's code (rollout.env.host.code_of),
    which variables that may see and how long it may take to load, what the main module of this process is, and the
    values of SAFE and PATH from which on all goes."""
    main = spawn.get_preparation_data("environments")
    names = main.get("init_main_from_name"), main.get("init_main_from_path")
    return json.dumps([{name: os.environ.get(name) for name in (SAFE, PATH)}, code, list(variables), seconds, *names])


def prepare(code: Sequence[str], variables: Sequence[str], seconds: float, name: str | None, path: str | None) -> None:
    """Loads the environment's code, with its variables as in the processes. If that takes longer than `seconds`, the
    server ends, and its log shows where it was.

    The main module is not loaded: environments never use it, and where it is a worker of Ray's each process would take
    half a second to import Ray. It counts as imported if it has that name or file."""
    main = sys.modules["__main__"]
    if name is not None:
        main.__spec__ = ModuleSpec(name, None)
    if path is not None:
        main.__file__ = path
    own = {name: os.environ[name] for name in variables}
    withhold()
    faulthandler.dump_traceback_later(seconds, exit=True)  # whatever holds Python's lock
    with lent(own):
        for use in code:
            with contextlib.suppress(Exception, SystemExit):
                found(use)
    faulthandler.cancel_dump_traceback_later()


if VARIABLE in os.environ:
    start_sweeper()
    before, *asked = json.loads(os.environ.pop(VARIABLE))
    for one in (SAFE, PATH):
        os.environ.pop(one)
    os.environ.update({one: value for one, value in before.items() if value is not None})
    prepare(*asked)
