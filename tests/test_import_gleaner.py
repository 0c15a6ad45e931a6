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
    assert told(program, tmp_path) == "[] learner.api.calls learner.api.calls learner.api.calls"


NAMES = ("cluster", "learner", "rewards", "rollout")
ORDERS = {
    "theirs first": "from {name} import mine\nimport gleaner",
    "ours first": "import gleaner\nfrom {name} import mine",
    "both": "import {name}\nmine = {name}.mine\nimport gleaner\nfrom {name} import mine as same\nassert same is mine",
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_what_the_users_module_of_that_name_has(name: str, order: str, tmp_path: Path) -> None:
    """In whatever order, and gleaner has its own; it is sent to another process as other functions are."""
    place = tmp_path / (f"{name}.py" if order != "both" else f"{name}/__init__.py")
    place.parent.mkdir(exist_ok=True)
    place.write_text("ONE = 1\ndef mine():\n    return ONE\n")
    send = (
        "from rewards.functions import pack\nfrom pathlib import Path\n"
        "Path('f.pickle').write_bytes(pack(mine).content)\nprint(gleaner.train.__module__, mine())\n"
    )
    assert told(["-c", f"{ORDERS[order].format(name=name)}\n{send}"], tmp_path) == "learner.api.calls 1"
    load = (
        "from rewards import functions\nfrom pathlib import Path\nprint(functions.load_pickled(Path('../f.pickle'))())"
    )
    (tmp_path / "elsewhere").mkdir()
    assert told(["-c", load], tmp_path / "elsewhere") == "1"


@pytest.mark.parametrize("name", NAMES)
def test_what_it_has_not_is_not_found(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("def mine(): ...")
    code = f"import gleaner\nfrom {name} import yours"
    assert "cannot import name 'yours' from" in told(["-c", code], tmp_path, code=1)


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
