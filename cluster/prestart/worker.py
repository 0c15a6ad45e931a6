"""worker.py PARENT COMMON PREPARATION=LISTENER,... ...: calls COMMON, which imports what all roles do. A process forked
for each PREPARATION calls that, which imports the rest, and one for each LISTENER, the descriptor of the socket at
which a role's shim asks, becomes the worker that the shim hands over. COMMON and PREPARATION are MODULE:FUNCTION.
PARENT: the process that started this one.

Each process ends with its parent, and without a word where it may not become that worker: the shim then starts an
ordinary one, which tells whatever is wrong.
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
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# What schedulers send to all processes of a job as a warning, or a terminal as it vanishes: the driver ends the run,
# and needs the others for its last step. Not SIGTERM, by which Ray and reward processes end what they have started.
FOR_THE_DRIVER = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
TAKEN = b"t"
# Each shell changes them or takes them away, also the one that Ray starts a worker by; an activated environment exports
# PS1.
OF_SHELLS = ("_", "PWD", "OLDPWD", "SHLVL", "PS1", "PS2", "PS4", "OPTIND", "IFS")
ROOT = Path(__file__).parents[2]  # of gleaner's packages


def main() -> None:
    """Returns when all workers have ended."""
    parent, common, *preparations = sys.argv[1:]
    pairs = [preparation.split("=") for preparation in preparations]
    wanted = {name: {int(descriptor) for descriptor in listeners.split(",")} for name, listeners in pairs}
    if not _ends_with(int(parent)):
        return
    leave_to_the_driver()
    environment = {name: value for name, value in os.environ.items() if name not in OF_SHELLS}
    sys.path[0] = str(ROOT)
    gc.disable()  # it would look at a million objects that imports make, and find no garbage
    _import(common)
    opened = {descriptor for own in wanted.values() for descriptor in own}
    _fork(opened, {frozenset(own): partial(_prepare, name, own, environment) for name, own in wanted.items()})


def leave_to_the_driver() -> None:
    """This process ignores FOR_THE_DRIVER, and so do all that it starts."""
    for number in FOR_THE_DRIVER:
        signal.signal(number, signal.SIG_IGN)


def _fork(opened: set[int], work: Mapping[frozenset[int], Callable[[], None]]) -> None:
    """Each in a process of its own, which ends with this one, and has its own of the opened descriptors alone. Returns
    when all have ended."""
    gc.freeze()
    ours = os.getpid()
    for own, one in work.items():
        if os.fork() == 0:
            os.setsid()  # Ray ends the whole process group of a worker that has died
            if _ends_with(ours):
                _close(opened - own)
                one()
            sys.exit()
    _close(opened)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return


def _ends_with(parent: int) -> bool:
    """From now on; false if it has ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _prepare(preparation: str, listeners: set[int], environment: Mapping[str, str]) -> None:
    _import(preparation)
    if len(listeners) == 1:  # a fork would leave the one before it behind, with 130 MB of its own
        _work(next(iter(listeners)), environment)
    else:
        _fork(listeners, {frozenset([one]): partial(_work, one, environment) for one in listeners})


def _work(descriptor: int, environment: Mapping[str, str]) -> None:
    """Becomes the worker that is handed over."""
    gc.enable()
    with socket.socket(fileno=descriptor) as listener:  # closed after one worker: the next one is refused
        shim, _ = listener.accept()
    worker, files = _received(shim)
    if other := [name for name, value in environment.items() if worker["environment"].get(name) != value]:
        sys.exit(f"the worker has another {', '.join(other)}, under which something may have been imported")
    _take_place(worker)
    shim.sendall(TAKEN)
    _become(worker, files)


def _import(preparation: str) -> None:
    """An import of ray fails meanwhile, since it reads its settings from the environment once, and the worker's come
    with the handover."""
    module, _, function = preparation.partition(":")
    assert "ray" not in sys.modules, "something imports ray as each interpreter starts"
    sys.modules["ray"] = None  # type: ignore[assignment]
    getattr(import_module(module), function)()
    del sys.modules["ray"]


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
