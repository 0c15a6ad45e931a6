"""A run with a loss of the user's: tried before it starts, found wherever it runs, remembered by its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from examples.random_model import make_tiny_model
from learner.config import RunConfig
from learner.config.load import absolute
from learner.driver import preflight
from learner.driver.identity import FILE, Fingerprints, check_allowed, check_same_run, fingerprints_of

LOSS = "def mine(tokens, cap=2.0):\n    return tokens.weighted(tokens.ratio.clamp(max=cap)), tokens.ratio > cap\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("my_loss.py").write_text(LOSS)
    return tmp_path


def config_of(ratio: str = "my_loss.py:mine", **changed: Any) -> RunConfig:
    given: dict[str, Any] = {
        "model": {"path": "tiny", "dtype": "float32"},
        "data": {"path": "data.jsonl", "eval": {"every": 0}},
        "rewards": [{"use": "format"}],
        "rollout": {"max_prompt_length": 64, "max_completion_length": 16},
        "learner": {"loss": {"ratio": ratio}},
    }
    return RunConfig.model_validate(given | changed)


def test_the_file_is_named_by_its_whole_path(here: Path) -> None:
    assert absolute(config_of()).learner.loss.ratio == f"{here}/my_loss.py:mine"
    assert absolute(config_of("gone.py:mine")).learner.loss.ratio == "gone.py:mine"
    assert absolute(config_of("package.module:mine")).learner.loss.ratio == "package.module:mine"
    Path("venv").mkdir()
    env = {"use": "tools", "args": {"functions": ["my_loss.py:mine", "package.module:mine"], "timeout_s": 3}}
    assert absolute(config_of(env=env)).env.args == {
        "functions": [f"{here}/my_loss.py:mine", "package.module:mine"], "timeout_s": 3
    }  # fmt: skip
    own = {"use": "verifiers", "args": {"python": "venv", "environment": {"id": "venv"}}}
    assert absolute(config_of(env=own)).env.args == {"python": f"{here}/venv", "environment": {"id": "venv"}}
    assert absolute(config_of("clip")).learner.loss.ratio == "clip"


@pytest.mark.long
def test_preflight_tries_it(here: Path) -> None:
    make_tiny_model(here / "tiny")
    Path("data.jsonl").write_text("".join(json.dumps({"question": f"Say {i}"}) + "\n" for i in range(20)))
    prepared = preflight.prepare(config_of())
    assert prepared.config.learner.loss.ratio == f"{here}/my_loss.py:mine"
    assert prepared.config.data.path == f"{here}/data.jsonl"  # gleaner eval --run may be started elsewhere
    assert list(prepared.fingerprints.loss) == ["mine of my_loss.py"]
    Path("wrong.py").write_text("def mine(tokens):\n    return tokens.ratio * float('nan'), tokens.ratio > 2\n")
    with pytest.raises(WrongInput) as caught:
        preflight.prepare(config_of("wrong.py:mine"))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"learner.loss.ratio: {here}/wrong.py:mine must have a finite objective, got [nan, nan,")


def test_a_checkpoint_remembers_the_content_of_the_file(here: Path) -> None:
    folder = here / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    Path("tiny").mkdir()
    config = config_of()
    found = fingerprints_of(config, [])
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / FILE).write_text(found.to_json())
    assert fingerprints_of(config_of("clip"), []).loss == {}
    assert check_same_run(config_of(f"{here}/my_loss.py:mine"), found, folder) == []  # another copy of the same file
    Path("my_loss.py").write_text(LOSS.replace("2.0", "3.0"))
    other = fingerprints_of(config, [])
    with pytest.raises(WrongInput, match=r"another content of loss \(mine of my_loss.py\); .*_changed=\[loss\]$"):
        check_same_run(config, other, folder)
    allowed = config_of(resume_allow_changed=["loss"])
    check_allowed(allowed)
    assert check_same_run(allowed, other, folder) == ["content of loss (mine of my_loss.py)"]
    with pytest.raises(WrongInput, match=r"another learner.loss.ratio \(my_loss.py:mine, now my_loss.py:yours\);"):
        check_same_run(config_of("my_loss.py:yours"), found, folder)


def test_a_checkpoint_of_before_has_no_loss_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").write_text('{"data": {}, "rewards": {}, "base": {}}')
    assert Fingerprints.read(tmp_path / "inputs.json").loss == {}
