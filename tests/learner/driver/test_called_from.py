"""A call that cannot work says why: somebody else's packages, a running event loop, a script without a guard."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from learner.driver.called_from import hidden_package
from learner.main import main


@pytest.mark.parametrize("file", ["cluster.py", "rewards/__init__.py", "learner.py", "rollout.py"])
def test_a_module_of_our_name_in_the_working_directory(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "cluster").mkdir(parents=True)
    Path("rewards").mkdir()  # a folder without __init__.py hides nothing
    assert hidden_package() == ""
    Path(file).write_text("")
    assert main(["model.path=x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: {tmp_path / file} hides gleaner's package {file.split('/')[0].removesuffix('.py')} "
    )


def test_it_is_said_before_our_own_imports_fail(tmp_path: Path) -> None:
    """As the command line meets it: the user's cluster.py comes first on the path."""
    (tmp_path / "cluster.py").write_text("raise RuntimeError('not ours')")
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"}
    words = [sys.executable, "-m", "learner.main", "model.path=x"]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=root, env=environment, timeout=120)
    # `python -m` puts the working directory first, so that ours are found here; from elsewhere the user's are.
    assert "model.path" not in ran.stdout
    ran = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert ran.returncode == 2
    assert ran.stderr.startswith(f"error: {tmp_path / 'cluster.py'} hides gleaner's package cluster")
    assert len(ran.stderr.splitlines()) == 1


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
