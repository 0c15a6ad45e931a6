"""`import gleaner` is what `learner` has for Python, whatever files lie beside the script."""

import subprocess
import sys
from pathlib import Path

import pytest

import gleaner
import learner

ROOT = Path(__file__).parents[1]
SCRIPT = """
import gleaner, sys
heavy = [name for name in ("torch", "ray", "vllm", "yaml", "pyarrow") if name in sys.modules]
from gleaner import evaluate, plan, train
print(heavy, *[one.__module__ for one in (train, evaluate, plan)])
"""


def test_it_has_what_learner_has() -> None:
    for name in learner.HOMES:
        assert getattr(gleaner, name) is getattr(learner, name)
    assert {*learner.HOMES, "__version__"} <= set(dir(gleaner))
    assert gleaner.__version__
    for module in (gleaner, learner):
        with pytest.raises(AttributeError, match="has no attribute 'trian'; it has InputError, "):
            module.trian  # noqa: B018


@pytest.mark.parametrize("program", [["script.py"], ["-c", SCRIPT]])  # the latter has '' on its path, as a notebook
def test_beside_files_of_our_names(program: list[str], tmp_path: Path) -> None:
    for name in ("cluster", "learner", "rewards", "rollout"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError")
    (tmp_path / "script.py").write_text(SCRIPT)
    assert told(program, tmp_path) == "[] learner.api.training learner.api.evaluating learner.api.planning"


@pytest.mark.parametrize("file", ["rewards.py", "cluster/__init__.py"])
def test_one_that_was_imported_before(file: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    name = Path(file).parts[0].removesuffix(".py")
    assert told(["-c", f"import {name}\nimport gleaner"], tmp_path, code=1) == (
        f"ImportError: {name}: must be gleaner's package in {ROOT}, but {tmp_path / file} was imported by this name "
        f"before; rename it, or import nothing of it and name functions by the file: '{name}.py:function'"
    )


def told(program: list[str], folder: Path, code: int = 0) -> str:
    """The last line that it prints."""
    ran = subprocess.run(
        [sys.executable, *program],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == code, ran.stdout + ran.stderr
    return (ran.stdout + ran.stderr).splitlines()[-1]
