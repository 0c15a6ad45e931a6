"""Loaded once by the server that environments' processes are forked from, so that a new one costs milliseconds.

What goes wrong here is said by the first process that needs it: it loads the same again.
"""

import contextlib
import os

import rollout.env.host  # noqa: F401  (what every process needs)
from rewards.environment import withhold
from rollout.env.loader import found

VARIABLE = "GLEANER_ENVIRONMENT"  # env.use, for the server alone

if use := os.environ.pop(VARIABLE, None):
    withhold()
    with contextlib.suppress(Exception, SystemExit):
        found(use)
