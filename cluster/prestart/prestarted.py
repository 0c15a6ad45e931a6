"""The prestarted processes of a run, from their start to their end."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from cluster.ray_temp_dir import RuntimeFolder

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

    def start(self, role: str, preparation: str, env: Mapping[str, str]) -> None:
        """preparation: `module:function`, without arguments, of what the role's process imports. env: as the role's
        worker will have it, beside what this process has."""
        if self._folder is None:
            self._folder = RuntimeFolder()
        where, printed = self._folder.path / role, self._folder.path / f"{role}.out"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, printed.open("wb") as file:
            listener.bind(str(where))
            listener.listen(1)
            process = subprocess.Popen(
                [sys.executable, str(HERE / "worker.py"), str(listener.fileno()), preparation, str(os.getpid())],
                pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,  # Ctrl-C is for the driver, which ends the others
            )  # fmt: skip
        self._processes.append(process)
        self.commands[role] = shlex.join(
            [sys.executable, "-I", "-S", str(HERE / "shim.py"), str(where), sys.executable]
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
