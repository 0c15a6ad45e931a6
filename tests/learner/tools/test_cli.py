"""gleaner as a whole: help without anything heavy, mistakes in one sentence, what each command passes on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from learner.main import main as run_main
from learner.tools.cli import build, main
from learner.tools.rewards_try import built_ins
from rewards.loader import BUILT_INS
from tests.cli_page import DOCUMENT, commands, document

PATHS = [path.split()[1:] for path, command in commands(build(), "gleaner") if not hasattr(command, "commands")]


@pytest.mark.parametrize("words", PATHS, ids=" ".join)
def test_the_help_of_a_command_loads_nothing_that_it_needs_to_run(words: list[str]) -> None:
    """Typer itself loads pydantic where a command is called."""
    heavy = {"torch", "transformers", "ray", "vllm", "datasets", "pyarrow", "numpy", "learner.config"}
    assert loaded([*words, "--help"], heavy)[0] == "[]"


def loaded(words: list[str], modules: set[str]) -> list[str]:
    """Which of the modules gleaner has loaded when it ends; before that the words that it has printed."""
    code = f"import sys; from learner.tools.cli import main; assert main({words}) == 0; sys.stdout.flush()\n"
    code += f"print(sorted({modules} & set(sys.modules)), file=sys.stderr)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [told.stderr.strip(), *told.stdout.split()]


def test_help_loads_nothing_heavy() -> None:
    modules = {"torch", "transformers", "ray", "vllm", "numpy", "pyarrow", "pydantic", "rich", "learner.tools.plan"}
    found, *told = loaded(["--help"], modules)
    assert found == "[]"
    assert {"init", "plan", "doctor", "train", "rewards", "reward-model", "rollouts", "report"} <= set(told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "gleaner: must be followed by init, plan, .*, got nothing$"),
        (["trian"], "gleaner: must be followed by init, .*, got trian; did you mean gleaner train[?]$"),
        (["bogus"], "got bogus; gleaner --help says more$"),
        (["rewards", "lst"], "gleaner rewards: must be followed by list or try, got lst; did you mean gleaner rewards"),
        (["plan", "--gpu", "24", "--modle", "x"], "gleaner plan: No such option: --modle; did you mean --model[?]$"),
        (["reward-model", "train", "p", "--out", "o"], "--model: required, but not given$"),
        (["plan", "--gpu", "24", "--rank", "3"], "--rank: '3' is not one of '1', '2', '4', '8', '16'"),
        (["plan", "--gpu", "24", "--model", "x", "--all"], "--all: does not go with --model, .*; leave one"),
        (["reward-model", "train", "p", "--model", "m", "--out", "o", "--learning-rate", "-1"],
         "--learning-rate: must be a finite number above 0, got '-1'$"),
        (["report", "x", "--port", "80"], "--port: is of --live; give that as well, or leave it out$"),
        (["rewards", "try"], "--config, --data or --rollouts: one is required"),
        (["doctor", "\x1b[2J"], r"^error: gleaner doctor: [^\x1b]+$"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == ""
    assert line.startswith("error: ")
    assert re.search(told, line)


@pytest.mark.parametrize("train", [lambda words: main(["train", *words]), run_main], ids=["gleaner", "learner.main"])
def test_train_and_learner_main_are_the_same(
    train: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    def told(*words: str) -> str:
        assert train([*words]) == 2
        return capsys.readouterr().err

    others = ["data.path=y", "rewards=[{use: format}]"]
    assert "--assume-gpus: a run needs the cards themselves" in told("--assume-gpus", "h100", "--model.path=x", *others)
    assert "--verbose: is of --dry-run" in told("model.path=x", *others, "--verbose")
    assert "config: --config absent.yaml: No such file" in told("--config", "absent.yaml", "--dry-run")
    assert "did you mean learning_rate?" in told("--learner.learnin_rate=1", "model.path=x", "data.path=y")
    assert told().startswith("config: --config: required, but not given; ")
    assert re.fullmatch(r"error: (gleaner|learner.main): Option '--config' requires an arg.*\n", told("--config"))
    assert train(["--keys"]) == 0
    assert "  learner.lora.rank = 16  (1 | 2 | 4 | 8 | 16 | 32" in capsys.readouterr().out
    assert train(["--help"]) == 0
    assert "--keys              List every key with its choices and default." in capsys.readouterr().out


def test_where_all_commands_are_listed_each_is_told_by_its_own_help() -> None:
    listed = {command.name: command for command in build().commands.values() if not hasattr(command, "commands")}
    assert len(listed) > 5
    for command in listed.values():
        assert command.get_short_help_str(500) == command.loaded().get_short_help_str(500) != ""


def test_the_shell_is_given_keys_to_complete() -> None:
    typed = {"COMP_WORDS": "gleaner train learner.lora.ra", "COMP_CWORD": "2", "_GLEANER_COMPLETE": "complete_bash"}
    words = [sys.executable, "-m", "learner.tools.cli"]
    told = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, **typed})
    assert told.stdout.split() == ["learner.lora.rank="]


def test_what_an_encoding_lacks_ends_no_command() -> None:
    words = ["plan", "--gpu", "24", "--model", "Llama-3.2-1B"]
    code = f"import sys; from learner.tools.cli import console; sys.argv[1:] = {words}; console()"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env=os.environ | {"PYTHONIOENCODING": "latin-1"}
    )
    assert b"rollout:" in told.stdout
    assert b"????" in told.stdout


def test_versions_without_importing_what_they_are_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(told) == ["gleaner", "vLLM", "torch", "Ray"]
    assert told["Ray"][0].isdigit()


def test_every_option_says_what_it_is_and_every_command_gives_examples() -> None:
    for path, command in commands(build(), "gleaner"):
        own: Any = command
        assert [one.name for one in own.params if not one.help] == [], path
        if not hasattr(own, "commands"):
            assert f"  {path} " in f"{own.epilog} ".replace("\n", " \n"), path
            assert "Exit codes: 0 done, 1 " in own.epilog, path


def test_the_page_is_of_these_commands() -> None:
    assert DOCUMENT.read_text() == document(), "run: python -m tests.cli_page"


def test_built_in_rewards_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "list", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found.keys() == BUILT_INS.keys()
    assert found["reasoning_gym"]["columns"] == ["answer", "metadata"]
    assert found["length"]["args"] == {"target": "required", "kind": "'linear'", "unit": "'tokens'"}
    assert all(one.says.endswith((".", "else 0.0.")) for one in built_ins())
    assert main(["rewards", "list"]) == 0
    assert "args: pattern=required, full=False" in capsys.readouterr().out
