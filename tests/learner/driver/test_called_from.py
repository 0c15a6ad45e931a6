"""A call that cannot work says why: somebody else's packages on PYTHONPATH, a running event loop, a script without a
guard."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.own_path import ROOT
from learner.driver.process import hidden_package, ours_first
from learner.main import main


@pytest.mark.parametrize("file", ["cluster.py", "rewards/__init__.py"])
def test_another_module_of_our_name_that_new_processes_would_import(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    (tmp_path / "data" / "cluster").mkdir(parents=True)
    (tmp_path / "rewards").mkdir()  # a folder without __init__.py hides nothing
    assert hidden_package() == ""
    (tmp_path / file).write_text("")
    assert main(["model.path=x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    name = file.split("/")[0].removesuffix(".py")
    assert line.startswith(f"error: PYTHONPATH: {tmp_path / file} hides gleaner's package {name} (in {ROOT}) ")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    assert hidden_package() == ""


@pytest.mark.parametrize("entry", ["", "given"])
def test_folders_with_modules_of_our_names_come_last(
    entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path) if entry else ""
    monkeypatch.setattr(sys, "path", [folder, "other", str(ROOT)])
    ours_first()
    assert sys.path == [folder, "other", str(ROOT)]
    Path("rewards.py").write_text("")
    ours_first()
    assert sys.path == ["other", str(ROOT), folder]


def test_a_call_in_a_running_event_loop(capsys: pytest.CaptureFixture[str]) -> None:
    async def notebook() -> int:
        return main(["model.path=x"])

    assert asyncio.run(notebook()) == 2
    assert "error: main() runs an event loop of its own and cannot be called inside one" in capsys.readouterr().err


CALL = "from learner.main import main\n"
FUNCTION = "def go():\n    print(main(['bogus=1']))\n"
GUARD = "if __name__ == '__main__':\n"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (f"{CALL}print(main(['bogus=1']))\n", "line 2: main() starts processes that import this script again"),
        (f"{CALL}if True:\n    print(main(['bogus=1']))\n", "line 3: main() starts processes"),
        (f"{CALL}{FUNCTION}go()\n", "line 4: main() starts processes"),
        (f"{CALL}{GUARD}    print(main(['bogus=1']))\n", "config: bogus"),
        (f"{CALL}{FUNCTION}{GUARD}    go()\n", "config: bogus"),
    ],
)
def test_a_script_without_a_guard(script: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    words = [sys.executable, "mine.py"]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert told in ran.stderr
    assert ran.stdout.split() == ["2"]
