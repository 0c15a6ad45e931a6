"""Keys of earlier versions: who writes one is told its new name, and what runs have recorded means what it meant."""

import json
from pathlib import Path
from typing import Any

import pytest

from gleaner import InputError, train
from learner.config.load import MOVED, ConfigError, keys, load_config, recorded, since_moved
from learner.driver.identity import config_of
from learner.tools.replay.recorded import load_config as replayed

BEFORE = Path(__file__).with_name("recorded_before.json")  # of a run of before, many of whose settings are no defaults
NEEDED = ["model.path=m", "data.path=d", "rewards=[{use: format}]"]


def given() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BEFORE.read_text())
    return found


def told(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*NEEDED, *overrides])
    return str(caught.value).splitlines()


TOLD = [  # an override, and the ends of the line that it gets
    ("learner.loss.band=[0.5, 3]", "write learner.loss.bounds.band=[0.5, 3] (got [0.5, 3])"),
    ("learner.loss.cap=null", "leave it out (got None)"),
]


@pytest.mark.parametrize(("override", "end"), TOLD)
def test_an_old_key_is_told_its_new_name_and_value(override: str, end: str) -> None:
    (line,) = told(override)
    assert line.startswith(f"{override.partition('=')[0]}: ")
    assert line.endswith(f"; {end}")


def test_so_it_is_in_a_file_with_each_key_of_a_section_and_in_python(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("learner: {loss: {cap: 3, delta: 2}}\nguard: {mismatch: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(str(file), NEEDED)
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["learner.loss.cap", "learner.loss.delta", "guard.mismatch"]
    with pytest.raises(InputError, match=r"^learner.loss.cap: .* write learner.loss.bounds.cap=3 \(got 3\)$"):
        train(model="m", dataset="d.jsonl", rewards=["format"], learner={"loss": {"cap": 3}})


def test_no_key_of_today_is_among_them_and_each_leads_to_one_of_today() -> None:
    today = {key.name for key in keys()}
    assert {moved.key for moved in MOVED} & today == set()
    with_values = since_moved(given())
    assert recorded(given()) == recorded(with_values)


def test_a_recorded_configuration_means_what_it_meant() -> None:
    config = recorded(given())
    assert config.learner.loss.bounds == {"band": (0.25, float("inf"))}


def test_an_old_run_folder_is_resumed_and_replayed_by_what_it_recorded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(BEFORE.read_text())
    (tmp_path / "config.yaml").write_text(BEFORE.read_text().replace("Infinity", ".inf"))
    assert config_of(tmp_path) == replayed(tmp_path, ()) == recorded(given())
    assert replayed(tmp_path, ["learner.loss.bounds={}"]).learner.loss.bounds == {}
    with pytest.raises(ConfigError, match="learner.loss.band: is an argument"):
        replayed(tmp_path, ["learner.loss.band=[0.5, 3]"])
