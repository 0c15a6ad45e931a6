"""The console script: `gleaner` once it is known that the packages of our names are ours."""

import sys
from typing import NoReturn

from learner.driver.called_from import hidden_package


def console() -> NoReturn:
    """Exit code 2 where a module of the user would be imported in place of a package of ours."""
    if wrong := hidden_package():
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
    from learner.tools import cli

    cli.console()
