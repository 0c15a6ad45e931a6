"""A process that imports before Ray asks for it becomes Ray's worker, or the shim becomes an ordinary one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from cluster.prestart import shim
from cluster.prestart.prestarted import Prestarted
from tests.flow.run import wait_until

WORKER = """
import json, os, sys, tempfile
from pathlib import Path
found = {
    "pid": os.getpid(), "argv": sys.argv[1:], "path": sys.path[0], "cwd": os.getcwd(), "main": __name__,
    "told": os.environ.get("TOLD"), "kept": os.environ.get("KEPT"), "temp": tempfile.gettempdir(),
    "imported": [name in sys.modules for name in ("wave", "colorsys")],
    "ray": sys.modules.get("ray", "free"), "root": sys.path[0] in sys.path[1:],
}
Path(sys.argv[1]).write_text(json.dumps(found))
print("printed by the worker", flush=True)
sys.stdin.read()  # until it may end
os._exit(int(sys.argv[2]))
"""


def common() -> None:
    """What the prestarted processes of these tests import together."""
    import wave  # noqa: F401


def ready() -> None:
    """What one imports for itself."""
    import colorsys  # noqa: F401

    try:
        import ray  # noqa: F401
    except ImportError:
        return
    raise AssertionError("ray reads its settings as it is imported")


def broken() -> None:
    raise ImportError("not here")


def endless() -> None:
    time.sleep(600)


def nothing() -> None:
    pass


@pytest.fixture
def early() -> Iterator[Prestarted]:
    with Prestarted() as found:
        yield found


def start(early: Prestarted, preparations: dict[str, str], kept: str = "as it was") -> None:
    early.start(f"{__name__}:common", {r: f"{__name__}:{name}" for r, name in preparations.items()}, {"KEPT": kept})


class Asked:
    """The shim, started as the raylet does: by bash, with a worker's script and arguments."""

    def __init__(self, command: str, folder: Path, **env: str) -> None:
        script = folder / "scripts" / "default_worker.py"
        script.parent.mkdir(parents=True)
        script.write_text(WORKER)
        self._found, self.folder = folder / "found.json", folder
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {command} {script} {self._found} 3"], cwd=folder, text=True,
            env={**os.environ, "TOLD": "late", "TMPDIR": str(folder), **env},
            stdin=subprocess.PIPE, stdout=(folder / "printed").open("w"),
        )  # fmt: skip

    def found(self) -> dict[str, object]:
        """What the worker says of itself, once it runs."""
        for _ in range(600):
            if self._found.exists() and (text := self._found.read_text()):
                return dict(json.loads(text))
            time.sleep(0.05)
        raise AssertionError("no worker has come")

    def finish(self) -> int:
        """The exit code, once the worker may end."""
        self.process.communicate(timeout=30)
        return self.process.returncode


def expected(asked: Asked, pid: int, *imported: bool) -> dict[str, object]:
    return {
        "pid": pid, "argv": [str(asked.folder / "found.json"), "3"], "path": str(asked.folder / "scripts"),
        "cwd": str(asked.folder), "main": "__main__", "told": "late", "kept": "as it was", "temp": str(asked.folder),
        "imported": list(imported), "ray": "free", "root": False,
    }  # fmt: skip


def test_it_becomes_the_worker_and_the_shim_ends_with_it(
    early: Prestarted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PS1", "PS2", "PS4", "OPTIND", "IFS", "OLDPWD"):  # PS1 is there wherever an environment is activated
        monkeypatch.setenv(name, "as it was")
    start(early, {"learner": "ready"})
    asked = Asked(early.commands["learner"], tmp_path, KEPT="as it was")
    found = asked.found()
    assert found == expected(asked, int(str(found["pid"])), True, True)
    assert found["pid"] != asked.process.pid
    assert os.getsid(int(str(found["pid"]))) != os.getsid(0)  # Ctrl-C on the terminal does not reach it
    assert asked.process.poll() is None
    assert asked.finish() == 0
    assert (tmp_path / "printed").read_text() == "printed by the worker\n"

    again = tmp_path / "again"  # the role is revived
    again.mkdir()
    asked = Asked(early.commands["learner"], again, KEPT="as it was")
    assert asked.found() == expected(asked, asked.process.pid, False, False)
    assert asked.finish() == 3


def test_what_several_import_is_imported_once_and_none_ends_with_another(early: Prestarted, tmp_path: Path) -> None:
    start(early, {"learner": "ready", "generator-0": "nothing", "generator-1": "nothing"})
    asked = [Asked(early.commands[role], tmp_path / role, KEPT="as it was") for role in early.commands]
    pids = [int(str(one.found()["pid"])) for one in asked]
    for one, pid, ready in zip(asked, pids, (True, False, False), strict=True):
        assert one.found() == expected(one, pid, True, ready)
    assert len(set(map(os.getpgid, pids))) == 3
    for place in (2, 0):
        os.killpg(pids[place], signal.SIGKILL)  # as Ray does where a worker has died
        asked[place].process.wait(10)
    assert asked[1].process.poll() is None
    assert asked[1].finish() == 0


@pytest.mark.parametrize(
    ("preparation", "kept"),
    [("ready", "another value"), ("broken", "as it was"), ("endless", "as it was")],
    ids=["the environment differs", "the import fails", "the import takes too long"],
)
def test_an_ordinary_worker_starts_where_it_may_not_take_over(
    early: Prestarted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preparation: str, kept: str
) -> None:
    start(early, {"learner": preparation}, kept)
    command = early.commands["learner"]
    if preparation == "endless":  # the patience of the shim is not a setting
        impatient = tmp_path / "shim.py"
        impatient.write_text(Path(shim.__file__).read_text().replace("PATIENCE_S = 30.0", "PATIENCE_S = 0.5"))
        command = command.replace(shim.__file__, str(impatient))
    asked = Asked(command, tmp_path, KEPT="as it was")
    assert asked.found() == expected(asked, asked.process.pid, False, False)
    assert asked.finish() == 3


def test_it_ends_with_its_parent_and_with_the_run(tmp_path: Path) -> None:
    driver = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from cluster.prestart.prestarted import Prestarted\n"
        "early = Prestarted()\n"
        f"early.start('{__name__}:common', {{'learner': '{__name__}:endless'}}, {{}})\n"
        "pid = str(early._processes[0].pid)\n"
        "while not (forked := Path('/proc', pid, 'task', pid, 'children').read_text().split()): time.sleep(0.02)\n"
        "print(pid, *forked, flush=True)\n"
        "if sys.argv[1] == 'killed': os.kill(os.getpid(), signal.SIGKILL)\n"
        "early.close()\n"
    )
    for end, code in (("killed", -signal.SIGKILL), ("closed", 0)):
        done = subprocess.run([sys.executable, "-c", driver, end], stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode == code
        pids = done.stdout.split()
        assert len(pids) == 2
        wait_until(partial(all_ended, pids), "both to end", 10)


def all_ended(pids: list[str]) -> bool:
    return not any(psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != "zombie" for pid in pids)
