"""The process of a run that was started from Python: `python -m learner.api.child PARENT --config /dev/stdin`.

It ends with its parent. As PR_SET_PDEATHSIG goes by the thread that started it, that thread has to wait for it.
"""

import os
import signal
import sys

from learner.main import leave, main
from rewards.worker import signal_at_end_of_parent


def start(parent: int, argv: list[str]) -> int:
    """learner.main with its exit codes; 1 where the process `parent` has ended already."""
    # A first SIGTERM lets the run finish its step and write a checkpoint.
    signal_at_end_of_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts notebooks may have it ignored
    return main(argv)


if __name__ == "__main__":
    leave(start(int(sys.argv[1]), sys.argv[2:]))
