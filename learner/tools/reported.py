"""Runs a command's work, and prints the error that ended it to stderr."""

import sys
from collections.abc import Callable

from cluster.errors import WrongInput
from learner.driver import failure


def reported(work: Callable[[], None], failed: tuple[type[Exception], ...] = ()) -> int:
    """Runs `work` and returns the exit code: 0; 1 if the work failed; 2 for a wrong input. An error is printed.

    failed: errors of this command whose message needs no explanation; other failures are explained (failure.tell).
    """
    try:
        work()
    except (Exception, BaseExceptionGroup) as several:
        cause = failure.first_of(several)
        if isinstance(cause, (WrongInput, *failed)):
            print(f"error: {cause}".replace("\n", "\nerror: "), file=sys.stderr)
            return 1 if isinstance(cause, failed) else 2
        text, code = failure.tell(cause, failure.AGAIN)
        print(text, file=sys.stderr, flush=True)
        return code
    return 0
