"""gleaner doctor."""

from typing import Annotated

import typer

from learner.tools.arguments import epilog

EPILOG = epilog(
    "gleaner doctor", "gleaner doctor --json | jq '.[].mend'", failed="there is a problem that would stop a run"
)


def doctor(as_json: Annotated[bool, typer.Option("--json", help="The same as a list of objects.")] = False) -> int:
    """Say what this machine lacks for a run.

    It looks at driver, cards, wheels, compiler, memory, disk and hub, and says how to mend what is wrong.
    """
    from learner.tools.doctor import run

    return run(as_json=as_json)
