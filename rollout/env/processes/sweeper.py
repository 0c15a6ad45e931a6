"""Ends what environments have started when the process that they are forked from is gone, however that came.

The kernel ends the environments then (rewards.worker.confine), and not what they have started; and no code of the
server's own runs where it is killed, as Ray kills what a generator leaves. So it is a process of its own, which waits
for that. What it ends is known by a variable that each process hands on to those that it starts. Linux only.
"""

import os
import signal
import sys
from functools import partial

from cluster.process_tree import MARK, marked, sweep
from rewards.worker import signal_at_end_of_parent

PATIENCE_S = 5.0  # for the kernel to end them, and those that they start meanwhile


def start() -> None:
    """In the server, before anything is forked of it."""
    server = os.getpid()
    if sys.platform != "linux" or os.fork() > 0:
        return
    try:
        _wait_for_the_end_of(server)
        sweep(partial(marked, os.environ[MARK]), PATIENCE_S)
    finally:
        os._exit(0)


def _wait_for_the_end_of(parent: int) -> None:
    os.setpgrp()  # signals to the generator's group are not for us
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)  # nobody waits for our end of a pipe
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal_at_end_of_parent(signal.SIGUSR1)
    if os.getppid() == parent:
        signal.sigwait({signal.SIGUSR1})
