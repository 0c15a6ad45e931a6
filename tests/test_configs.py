"""Every shipped configuration is one that the program accepts."""

from pathlib import Path

import pytest
import yaml

from learner.config import RunConfig

CONFIGS = sorted((Path(__file__).parents[1] / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_shipped_configuration_is_valid(file: Path) -> None:
    config = RunConfig.model_validate(yaml.safe_load(file.read_text()))
    assert config.name != "run"  # two configurations must not share a run folder
