"""Loaded once by the server that environments' processes are forked from, so that a new one costs milliseconds.

What goes wrong here is said by the first process that needs it: it loads the same again.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from multiprocessing import spawn

import rollout.env.processes.host  # noqa: F401  (what every process needs)
from rewards.environment import withhold
from rollout.env.loader import found
from rollout.env.processes import sweeper

VARIABLE = "GLEANER_ENVIRONMENT"  # for the server alone


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


if VARIABLE in os.environ:
    sweeper.start()
    prepare(*json.loads(os.environ.pop(VARIABLE)))
