"""shim.py SOCKET PYTHON ARGUMENTS: what Ray starts as the worker of a prestarted role.

Hands arguments, environment, working directory, standard files and priorities to the process that waits at SOCKET, and
stays until that ends. Where none takes them, it becomes PYTHON ARGUMENTS, Ray's ordinary worker. It runs with -I -S, in
a hundredth of a second, so it imports of the standard library alone.
"""

import array
import json
import os
import socket
import sys
from pathlib import Path

PATIENCE_S = 30.0  # Ray waits for a worker for 60 s
TAKEN = b"t"
OOM_SCORE = Path("/proc/self/oom_score_adj")


def main() -> None:
    """Returns when the process that took over has ended."""
    where, python, *arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
        if _handed_over(waiting, where, arguments):
            _until_its_end(waiting)
            return
    os.execv(python, [python, *arguments])


def _handed_over(waiting: socket.socket, where: str, arguments: list[str]) -> bool:
    worker = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score_adj": OOM_SCORE.read_text(),
    }
    body = json.dumps(worker).encode()
    files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    waiting.settimeout(PATIENCE_S)
    try:
        waiting.connect(where)
        waiting.sendmsg([len(body).to_bytes(8, "big")], files)
        waiting.sendall(body)
        return waiting.recv(1) == TAKEN
    except OSError:  # nobody waits there, or it has ended, or imports for too long: the ordinary worker does without
        return False


def _until_its_end(waiting: socket.socket) -> None:
    waiting.settimeout(None)
    try:
        waiting.recv(1)  # nothing comes any more but the end of the file
    except ConnectionResetError:
        return


if __name__ == "__main__":
    main()
