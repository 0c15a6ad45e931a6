"""The prestarted processes of a run, from their start to their end."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from cluster.ray_private import RuntimeFolder

HERE = Path(__file__).parent


class Prestarted:
    """Processes that import before Ray asks for them. They end with this one, and what they print meanwhile lies in
    their folder as long as they run.

    commands: role -> what Ray is given as the command of that role's worker.
    """

    def __init__(self) -> None:
        self.commands: dict[str, str] = {}
        self._folder: RuntimeFolder | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, common: str, preparations: Mapping[str, str], env: Mapping[str, str]) -> None:
        """Roles that have one environment, and so one process that imports for all of them.

        common: `module:function`, without arguments, of what all of them import. preparations: role -> likewise, of
        what its own process, or that of all roles with this preparation, imports afterwards. env: as the roles' workers
        will have it, beside what this process has.
        """
        if self._folder is None:
            self._folder = RuntimeFolder()
        printed = self._folder.path / f"{len(self._processes)}.out"
        with ExitStack() as opened:
            file = opened.enter_context(printed.open("wb"))
            listeners = {role: opened.enter_context(_listening(self._folder.path / role)) for role in preparations}
            wanted: dict[str, list[str]] = {}
            for role, preparation in preparations.items():
                wanted.setdefault(preparation, []).append(str(listeners[role].fileno()))
            process = subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), str(os.getpid()), common,
                 *(f"{preparation}={','.join(of_roles)}" for preparation, of_roles in wanted.items())],
                pass_fds=[listener.fileno() for listener in listeners.values()],
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **env},
                start_new_session=True,  # Ctrl-C is for the driver, which ends the others
            )  # fmt: skip
        self._processes.append(process)
        for role in preparations:
            self.commands[role] = shlex.join(
                [sys.executable, "-I", "-S", str(HERE / "shim.py"), str(self._folder.path / role), sys.executable]
            )

    def close(self) -> None:
        """Ends those that still run."""
        for process in self._processes:
            process.kill()
            process.wait()
        if self._folder is not None:
            self._folder.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _listening(where: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(where))
    listener.listen(1)
    return listener
