"""Loads the environment's code once, in the fork server of rollout.env.process, so that a new process costs
milliseconds. Importing this module in the server does it.

Errors are ignored here: the first process that needs the code loads it again, and reports them.
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

# The sweeper ends all processes that environments have started, once the fork server has ended for any reason.
#
# When the server ends, the kernel ends the environments (rewards.slot.confine), but not the processes that they have
# started. The server cannot do it itself, since it may be killed, as Ray kills what a generator leaves. So the sweeper
# is a process of its own that waits for the server's end. It finds the processes by an environment variable that each
# process hands on to those it starts. Linux only.


PATIENCE_S = 5.0  # seconds in which the kernel ends environments, which may start processes meanwhile


def start_sweeper() -> None:
    """Starts the sweeper. To be called in the server, before anything else is forked from it."""
    server = os.getpid()
    if sys.platform != "linux" or os.fork() > 0:
        return
    try:
        _wait_for_the_end_of(server)
        sweep(partial(marked, os.environ[MARK]), PATIENCE_S)
    finally:
        os._exit(0)


def _wait_for_the_end_of(parent: int) -> None:
    os.setpgrp()  # signals to the generator's process group must not reach the sweeper
    silence()
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # so that the sweeper keeps no pipe open
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    if end_with_parent(parent, signal.SIGUSR1):
        signal.sigwait({signal.SIGUSR1})


VARIABLE = "GLEANER_ENVIRONMENT"  # environment variable with the `request`, which only the server gets
SAFE, PATH = "PYTHONSAFEPATH", "PYTHONPATH"  # environment variables with special values for the server's start


def request(code: Sequence[str], variables: Sequence[str], seconds: float) -> str:
    """The value of VARIABLE: what the server needs for `prepare`, and the values that SAFE and PATH get afterwards.

    code: names of the environment's code (rollout.env.host.code_of). variables: names of the environment variables that
    the code may see. seconds: how long it may take to load.
    """
    main = spawn.get_preparation_data("environments")
    names = main.get("init_main_from_name"), main.get("init_main_from_path")
    return json.dumps([{name: os.environ.get(name) for name in (SAFE, PATH)}, code, list(variables), seconds, *names])


def prepare(code: Sequence[str], variables: Sequence[str], seconds: float, name: str | None, path: str | None) -> None:
    """Loads the environment's code, with the variables that it has in the environments' processes.

    If loading takes longer than `seconds`, the server ends, and its log shows where it was. The run's main module is
    not loaded: environments never use it, and if it is Ray's worker, each process would take half a second to import
    Ray. name, path: of that main module; __main__ gets them, so that multiprocessing counts it as imported.
    """
    main = sys.modules["__main__"]
    if name is not None:
        main.__spec__ = ModuleSpec(name, None)
    if path is not None:
        main.__file__ = path
    own = {name: os.environ[name] for name in variables}
    withhold()
    faulthandler.dump_traceback_later(seconds, exit=True)  # works even if the code holds Python's global lock
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
