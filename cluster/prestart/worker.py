"""worker.py LISTENER MODULE:FUNCTION PARENT: calls the function, which imports, and becomes the worker that the shim
hands over. LISTENER: the descriptor of the socket at which the shim asks. PARENT: the process that started this one.

It ends with its parent, and without a word where it may not become that worker: the shim then starts an ordinary one,
which tells whatever is wrong.
"""

import array
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
TAKEN = b"t"
# Each shell changes them or takes them away, also the one that Ray starts a worker by; an activated environment exports
# PS1.
OF_SHELLS = ("_", "PWD", "OLDPWD", "SHLVL", "PS1", "PS2", "PS4", "OPTIND", "IFS")
ROOT = Path(__file__).parents[2]  # of gleaner's packages


def main() -> None:
    """Returns when the worker has ended."""
    descriptor, preparation, parent = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before that took effect
        return
    environment = {name: value for name, value in os.environ.items() if name not in OF_SHELLS}
    sys.path[0] = str(ROOT)
    with socket.socket(fileno=int(descriptor)) as listener:  # closed after one worker: the next one is refused
        _prepare(preparation)
        shim, _ = listener.accept()
    worker, files = _received(shim)
    if other := [name for name, value in environment.items() if worker["environment"].get(name) != value]:
        sys.exit(f"the worker has another {', '.join(other)}, under which something may have been imported")
    _take_place(worker)
    shim.sendall(TAKEN)
    _become(worker, files)


def _prepare(preparation: str) -> None:
    """Imports, without the garbage collector: imports make a million objects and no garbage. An import of ray fails
    meanwhile, since it reads its settings from the environment once, and the worker's come with the handover."""
    module, _, function = preparation.partition(":")
    assert "ray" not in sys.modules, "something imports ray as each interpreter starts"
    gc.disable()
    sys.modules["ray"] = None  # type: ignore[assignment]
    getattr(import_module(module), function)()
    del sys.modules["ray"]
    gc.enable()


def _received(shim: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What the shim says of the worker, and its three standard files."""
    files = array.array("i")
    size, rights, *_ = shim.recvmsg(8, socket.CMSG_SPACE(3 * files.itemsize))
    for _, _, data in rights:
        files.frombytes(data)
    body = bytearray()
    while len(body) < int.from_bytes(size, "big") and (part := shim.recv(1 << 16)):
        body += part
    return json.loads(body), list(files)


def _take_place(worker: dict[str, Any]) -> None:
    """What may fail, as long as another may still become that worker."""
    Path("/proc/self/oom_score_adj").write_text(worker["oom_score_adj"])
    os.setpriority(os.PRIO_PROCESS, 0, worker["nice"])
    os.chdir(worker["folder"])


def _become(worker: dict[str, Any], files: list[int]) -> None:
    """Runs the worker's script as the interpreter would have."""
    sys.stdout.flush()
    sys.stderr.flush()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(worker["environment"])
    tempfile.tempdir = None  # was looked up in the other environment
    sys.argv = worker["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
