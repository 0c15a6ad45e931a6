"""The console script: `gleaner` once it is known that packages of our names are ours in each process."""

import sys
from typing import NoReturn

from learner.driver.process import hidden_package


def console() -> NoReturn:
    """Exit code 2 where one of a new process would be another's."""
    if wrong := hidden_package():
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
    from learner.tools import cli

    cli.console()
