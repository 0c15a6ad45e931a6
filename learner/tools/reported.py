"""What ends a command, told on stderr; and the exit code."""

import sys
from collections.abc import Callable

from cluster.errors import WrongInput
from learner.driver import failure


def reported(work: Callable[[], None], failed: tuple[type[Exception], ...] = ()) -> int:
    """Exit code: 0; 1 if the work failed on the way; 2 if something given is wrong. What is wrong is printed.

    failed: errors of this command alone whose text says it all; other failures are told with their story.
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
