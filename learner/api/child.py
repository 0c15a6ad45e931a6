"""The process of a run that was started from Python: `python -m learner.api.child PARENT --config /dev/stdin`."""

import signal
import sys

from cluster.child import end_with_parent
from learner.driver import process
from learner.main import leave, main


def tie_to(parent: int) -> None:
    """This process ends with its parent, which is one more request to end: a run finishes its step first, and writes a
    checkpoint.

    As PR_SET_PDEATHSIG goes by the thread that started it, that thread has to wait for it. The kernel tells of the end
    of each thread of the parent.
    """
    process.keep_streams()
    for number in (signal.SIGINT, signal.SIGTERM):  # what starts notebooks may have them ignored
        signal.signal(number, signal.default_int_handler)
    process.end_as_command()
    if not end_with_parent(parent, signal.SIGTERM):  # it has ended already
        leave(1)


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    leave(main(sys.argv[2:]))
