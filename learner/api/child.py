"""The process of a run that was started from Python: `python -m learner.api.child PARENT --config /dev/stdin`."""

import os
import signal
import sys
import threading
from types import FrameType

from learner.main import leave, main
from rewards.worker import signal_at_end_of_parent

_told = threading.Lock()  # taken by the first call of a handler that may be called inside itself


def tie_to(parent: int) -> None:
    """This process ends with its parent: a first SIGTERM lets a run finish its step and write a checkpoint.

    As PR_SET_PDEATHSIG goes by the thread that started it, that thread has to wait for it.
    """
    signal.signal(signal.SIGUSR1, _parent_ended)
    signal_at_end_of_parent(signal.SIGUSR1)
    if os.getppid() != parent:  # it has ended already
        leave(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts notebooks may have it ignored


def _parent_ended(number: int, frame: FrameType | None) -> None:
    """The kernel tells of the end of each thread of the parent, and a second SIGTERM would end the run at once."""
    if _told.acquire(blocking=False):
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    leave(main(sys.argv[2:]))
