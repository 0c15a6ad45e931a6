"""Every command and block of code in the documents works as it stands, or exceptions.yaml says why it is not run."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.config.load import validated
from tests.documented.blocks import ROOT, Block, blocks, commands_of
from tests.documented.exceptions import NOT_RUN, PYTHON
from tests.documented.harmless import Refused, check, harm
from tests.documented.workspace import Workspace

QUICKSTART = "docs/quickstart.md"
COMMANDS = {block.page: commands_of(block.page) for block in blocks("bash")}
PAGES = [page for page in COMMANDS if page not in (QUICKSTART, "CONTRIBUTING.md")]


def is_run(command: str) -> bool:
    return not command.startswith("make ") and command not in NOT_RUN


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of docs/quickstart.md, whose commands are all run, to be looked at by those of the other pages."""
    space = Workspace(tmp_path_factory.mktemp("quickstart"))
    for command in filter(is_run, COMMANDS[QUICKSTART]):
        assert not (said := space.run(command)), said
    return space.folder / "first" / "runs" / "first-run"


@pytest.mark.long
def test_the_first_five_minutes(first_run: Path) -> None:
    assert (first_run / "report.html").is_file()
    assert (first_run / "adapter" / "adapter_config.json").is_file()


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page(page: str, first_run: Path, tmp_path: Path) -> None:
    if wanted := list(filter(is_run, COMMANDS[page])):
        space = Workspace(tmp_path, first_run)
        for command in wanted:
            assert not (said := space.run(command)), said


def test_the_reasons_are_of_commands_that_are_documented() -> None:
    documented = {command for found in COMMANDS.values() for command in found}
    assert NOT_RUN.keys() - documented == set()
    named = {block.page: block for block in blocks("python")}
    assert {page for page, _ in PYTHON} <= named.keys()
    told = " ".join([*NOT_RUN.values(), *PYTHON.values()])
    assert [path for path in re.findall(r"tests/[\w/]+\.py", told) if not (ROOT / path).is_file()] == []


def test_commands_that_change_the_machine_are_declared() -> None:
    for found in COMMANDS.values():
        for command in found:
            if command not in NOT_RUN and not command.startswith("make "):
                check(command)


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("pip install gleaner-rl", "pip"), ("cd my-run && touch a; .venv/bin/pip uninstall -y ray", "pip"),
        ("HF_HUB_OFFLINE=1 python3.11 -m pip install x", "pip"), ("sudo apt-get install chromium", "sudo"),
        ("cd gleaner && make setup", "make"), ("echo $(curl localhost)", "curl"), ("ray stop", "ray"),
    ],
)  # fmt: skip
def test_such_a_command_is_refused_before_any_of_it_runs(command: str, program: str, tmp_path: Path) -> None:
    space = Workspace(tmp_path)
    before = set(tmp_path.iterdir())
    with pytest.raises(Refused, match=f"{program} is not run in the environment of the tests; say in .*, why this"):
        space.run(command)
    assert set(tmp_path.iterdir()) == before
    assert harm("gleaner train --config pip.yaml 'rewards=[{use: make}]' && python -m learner.main --config uv") == ""


def test_the_targets_of_make_are_there() -> None:
    wanted = {words for found in COMMANDS.values() for words in found if words.startswith("make ")}
    assert len(wanted) > 10
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    for command in sorted(wanted):
        words = ["bash", "-c", f"{command} --dry-run"]
        told = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, env=clean)
        assert told.returncode == 0, f"{command}\n{told.stderr}"


def test_the_python_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    pages: dict[str, list[Block]] = {}
    for block in blocks("python"):
        pages.setdefault(block.page, []).append(block)
    assert {(page, block.first) for page, found in pages.items() for block in found} >= PYTHON.keys()
    for page, found in pages.items():
        names: dict[str, Any] = {"__name__": page}
        for block in found:
            code = compile(block.text, page, "exec")
            if (page, block.first) not in PYTHON:
                exec(code, names)


def test_the_configurations_are_accepted() -> None:
    """What a block leaves out is added."""
    least: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"use": "number"}]}
    found = list(blocks("yaml"))
    assert len(found) > 5
    for block in found:
        given = yaml.safe_load(block.text)
        if "steps" not in given:
            given = least | given
        assert validated(given) is not None, block.page
