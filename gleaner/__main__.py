"""`python -m gleaner`, and the console script: the command line, whatever lies in the working directory."""

import sys
from typing import NoReturn

from learner.driver.process import hidden_package


def console() -> NoReturn:
    """It begins once it is known that packages of our names are ours in each process; else the exit code is 2."""
    if wrong := hidden_package():
        print(f"error: {wrong}", file=sys.stderr)
        sys.exit(2)
    from learner.tools import cli

    cli.console()


if __name__ == "__main__":
    console()
