"""Where environments' processes come from, and how one is ended with all that it has started."""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess as Process

from cluster.process_tree import MARK, descendants, kill
from rewards.environment import lent, values_of
from rewards.secret_values import resolved
from rollout.env.config import EnvConfig
from rollout.env.loader import code_of
from rollout.env.processes import preload
from rollout.env.processes.host import Spec, host
from rollout.env.trajectory import EnvironmentFault
from rollout.sentences import Sentences

log = logging.getLogger("rollout")

STARTS = 5  # of a process, while what it is forked from dies
START_AGAIN_S = 0.1


def spec_of(config: EnvConfig) -> Spec:
    """What a process needs to make the environment. Raises RewardError for a variable that is named and not set,
    SecretError for an argument `env:NAME` likewise."""
    args, variables = resolved(config.args, "env.args"), values_of(config.variables, "env")
    return Spec(config.use or "", args, variables, config.memory, config.start_timeout_s)


class Forks:
    """Where environments' processes come from: a server that has loaded the environment's code, and is forked.

    Its thread must live as long as the processes, and starts them one after the other.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([preload.__name__])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="environment-starter")
        self.sentences = Sentences(log)  # of what is no fault of a trajectory

    def start(self, end: socket.socket, folder: str) -> "Future[Process]":
        """A new process that serves an environment on that end of a socket pair, which is closed here. folder: for its
        temporary files."""
        return self._thread.submit(self._start, end, folder)

    def _start(self, end: socket.socket, folder: str) -> Process:
        """Raises EnvironmentFault if the server dies of it each time, or there is none."""
        until = time.monotonic() + self.spec.seconds
        with end:
            for _ in range(STARTS):
                try:
                    return self._fork(end, folder)
                except (EOFError, ConnectionError):  # the server was killed; a fresh one is started once it is gone
                    if time.monotonic() > until:  # its code does not come to an end of loading (preload)
                        break
                    log.warning("the process that environments are forked from was lost; starting a fresh one")
                    time.sleep(START_AGAIN_S)
        raise EnvironmentFault(
            "env_killed",
            "reset: what its process is forked from died each time; see whether the environment's code ends the "
            "process that loads it, or loads longer than env.start_timeout_s, and whether the machine has memory and "
            "processes left",
        )

    def _fork(self, end: socket.socket, folder: str) -> Process:
        spec = self.spec
        told = {
            preload.VARIABLE: preload.request(code_of(spec.use, spec.args), [*spec.variables], spec.seconds),
            MARK: uuid.uuid4().hex,
            # Until Python 3.13 the server does not take this process's path, and finds a rollout.py of the user's.
            preload.SAFE: "1",
            preload.PATH: os.pathsep.join(filter(None, sys.path)),
        }
        resource_tracker.ensure_running()  # which is not the server's: it is not to be ended with it
        with lent(told):  # the server is started in here, or in start(), if it is lost in between
            forkserver.ensure_running()
            process = self._context.Process(target=host, args=(end, spec, folder), daemon=True)
            process.start()
        return process

    def close(self) -> None:
        """No process can be started after this."""
        self._thread.shutdown()


def end_process(started: Callable[[], Process]) -> None:
    """Blocks until the process is gone; it may be starting still."""
    try:
        process = started()
    except EnvironmentFault:  # it never was
        return
    assert process.pid is not None
    every = [process.pid, *descendants(process.pid)]
    with contextlib.suppress(ProcessLookupError):  # before it has a group, there is only itself
        os.killpg(process.pid, signal.SIGKILL)  # whose members may have outlived it
    kill(every)
    process.join()
    process.close()
