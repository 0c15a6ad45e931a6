"""Loaded once by the server that environments' processes are forked from, so that a new one costs milliseconds.

What goes wrong here is said by the first process that needs it: it loads the same again.
"""

import atexit
import contextlib
import ctypes
import json
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from multiprocessing import spawn

import rollout.env.processes.host  # noqa: F401  (what every process needs)
from rewards.environment import withhold
from rollout.env.loader import found
from rollout.env.processes.descendants import kill_own

VARIABLE = "GLEANER_ENVIRONMENT"  # for the server alone
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def request(code: Sequence[str]) -> str:
    """What the server is to be told through VARIABLE: what names the environment's code (rollout.env.loader.code_of),
    and what the main module of this process is."""
    main = spawn.get_preparation_data("environments")
    return json.dumps([code, main.get("init_main_from_name"), main.get("init_main_from_path")])


def prepare(code: Sequence[str], name: str | None, path: str | None) -> None:
    """Loads the environment's code. The main module is not: environments never use it, and where it is a worker of
    Ray's each process would take half a second to import Ray. It counts as imported if it has that name or file."""
    main = sys.modules["__main__"]
    if name is not None:
        main.__spec__ = ModuleSpec(name, None)
    if path is not None:
        main.__file__ = path
    withhold()
    for use in code:
        with contextlib.suppress(Exception, SystemExit):
            found(use)


def leave_nothing() -> None:
    """What environments have started ends with the server, which ends with the generator, even if that is killed: the
    kernel ends the environments then (rewards.worker.confine), and not what they have started. What is orphaned before
    becomes the server's child."""
    os.setpgrp()  # Ray ends the process group of a generator that was killed: the server ends by itself then
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # such a child
        atexit.register(kill_own)  # environments' processes end by os._exit, without it


if VARIABLE in os.environ:
    leave_nothing()
    prepare(*json.loads(os.environ.pop(VARIABLE)))
