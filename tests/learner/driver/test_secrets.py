"""A secret in data.args or in a reward's args: on its way through a run's files and messages, and back at a resume."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.errors import WrongInput
from learner.config import RunConfig
from learner.config.load import load_config, to_yaml
from rollout.data.sources import read

SECRET = "open-sesame-17"
TREE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"path": "org/data", "args": {"token": SECRET, "name": "main"}},
    "rewards": [{"use": "number", "args": {"api_key": SECRET}}],
}


def test_config_yaml_and_checkpoints_hold_a_mask_that_compares_equal() -> None:
    config = RunConfig.model_validate(TREE)
    assert config.data.args["token"] == SECRET
    stored = config.model_dump_json()
    assert SECRET not in stored + to_yaml(config) + repr(config)
    again = RunConfig.model_validate_json(stored)  # as a resume reads it
    assert again.model_dump(mode="json") == config.model_dump(mode="json")
    assert yaml.safe_load(to_yaml(config))["data"]["args"] == {"token": "***", "name": "main"}


def test_a_stored_mask_is_refused_where_the_secret_is_needed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(RunConfig.model_validate(TREE)))
    config = load_config(str(tmp_path / "config.yaml"), [])
    with pytest.raises(WrongInput, match=r"data.args: \*\*\* is what stored configurations show"):
        read(config.data.path, None, config.data.args, None, 0)


def test_the_library_gets_the_variables_value_and_its_message_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    def load_dataset_builder(*args: Any, **more: Any) -> None:
        seen.update(more)
        raise ValueError(f"401 for {more['token']}")

    monkeypatch.setattr("datasets.load_dataset_builder", load_dataset_builder)
    monkeypatch.setenv("MY_TOKEN", SECRET)
    (tmp_path / "data").mkdir()
    with pytest.raises(WrongInput, match=r"401 for \*\*\*") as error:
        read(str(tmp_path / "data"), None, {"token": SECRET}, None, 0)
    assert SECRET not in str(error.value)
    with pytest.raises(WrongInput):
        read(str(tmp_path / "data"), None, {"token": "env:MY_TOKEN"}, None, 0)
    assert seen["token"] == SECRET


def test_mistakes_in_the_configuration_are_told_without_it() -> None:
    token = "hf_" + "a1B2" * 8
    with pytest.raises(WrongInput) as error:
        load_config(None, [f"data.args={token}", f"rewards=[{{use: number, env: [{token}-x]}}]"])
    assert "data.args" in str(error.value)
    assert "rewards.0.env" in str(error.value)
    assert token[:12] not in str(error.value)
