"""Keys of earlier versions: who writes one is told its new name, and what runs have recorded means what it meant."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config import Deadlines
from cluster.errors import WrongInput
from gleaner import InputError, train
from learner.config import RunConfig
from learner.config.load import MOVED, keys, load_config, recorded
from learner.driver.identity import config_of
from learner.tools.replay.recorded import load_config as replayed
from rollout.config import RolloutConfig
from rollout.env.config import EnvConfig

BEFORE = Path(__file__).with_name("recorded_before.json")  # of a run of before, many of whose settings are no defaults
NEEDED = ["model.path=m", "data.path=d", "rewards=[{use: format}]"]


def given() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(BEFORE.read_text())
    return found


SAME_AS_ANOTHER = {
    "learner.loss.epsilon", "learner.loss.delta", "cluster.deadlines.start", "cluster.deadlines.step",
    "cluster.deadlines.heartbeat",
}  # fmt: skip


def told(*overrides: str) -> list[str]:
    with pytest.raises(WrongInput) as caught:
        load_config(None, [*NEEDED, *overrides])
    return str(caught.value).splitlines()


TOLD = [  # an override, and the ends of the line that it gets
    ("learner.loss.band=[0.5, 3]", "write learner.loss.bounds.band=[0.5, 3] (got [0.5, 3])"),
    ("learner.loss.cap=null", "leave it out (got None)"),
    ("cluster.deadlines.group=1800", "write cluster.patience=2.0 (got 1800)"),
    ("cluster.deadlines.push=60", "write cluster.patience=0.5 (got 60)"),
    ("env.timeout_s=600", "write cluster.patience=2.0 (got 600)"),
    ("env.timeout_s=long", "is a third of what one group may take now, by cluster.patience (got 'long')"),
    ("env.start_timeout_s=120", "write env.step_timeout_s=60.0 (got 120)"),
    ("env.start_timeout_s=9", "leave it out (got 9)"),
    ("env.memory=8GiB", "write rollout.process_memory=8589934592 (got '8GiB')"),
    ("env.memory=1GiB", "leave it out (got '1GiB')"),
    ("rollout.reward_memory=8GiB", "write rollout.process_memory=8GiB (got '8GiB')"),
    ("learner.offload_boundaries=true", "write learner.checkpointing=offloaded (got True)"),
    ("learner.offload_boundaries=false", "leave it out (got False)"),
    ("memory.base=shared", "write memory.layout=shared (got 'shared')"),
    ("memory.base=own", "leave it out (got 'own')"),
    ("memory.learner=6GiB", "leave it out (got '6GiB')"),
    ("memory.generator=6GiB", "leave it out (got '6GiB')"),
    ("guard.steps=7", "leave it out (got 7)"),
]


@pytest.mark.parametrize(("override", "end"), TOLD)
def test_an_old_key_is_told_its_new_name_and_value(override: str, end: str) -> None:
    (line,) = told(override)
    assert line.startswith(f"{override.partition('=')[0]}: ")
    assert line.endswith(f" {end}")


def test_so_it_is_in_a_file_with_each_key_of_a_section_and_in_python(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("learner: {loss: {cap: 3, delta: 2}}\nguard: {mismatch: 1}\n")
    with pytest.raises(WrongInput) as caught:
        load_config(str(file), NEEDED)
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["learner.loss.cap", "learner.loss.delta", "guard.mismatch"]
    with pytest.raises(InputError, match=r"^learner.loss.cap: .* write learner.loss.bounds.cap=3 \(got 3\)$"):
        train(model="m", dataset="d.jsonl", rewards=["format"], learner={"loss": {"cap": 3}})


def test_no_key_of_today_is_among_them_and_each_leads_to_one_of_today() -> None:
    today = {key.name for key in keys()}
    assert {moved.key for moved in MOVED} & today == set()
    assert {override.partition("=")[0] for override, _ in TOLD} >= {moved.key for moved in MOVED} - SAME_AS_ANOTHER
    leads = {found[0] for moved in MOVED if (found := moved.value(2**31)) is not None}
    assert {name.partition("bounds.")[0] + "bounds" * ("bounds." in name) for name in leads} <= today


def test_a_recorded_configuration_means_what_it_meant() -> None:
    config = recorded(given())
    assert config.learner.loss.bounds == {"band": (0.25, float("inf"))}
    assert (config.memory.layout, config.memory.device) == ("shared", 24 * 2**30)
    assert (config.cluster.patience, config.trajectory_s) == (2.0, 600)
    assert config.cluster.deadlines == Deadlines(start=1200, group=1800, step=7200, push=240, heartbeat=600)
    assert (config.env.step_timeout_s, config.env.start_timeout_s) == (60, 120)
    assert (config.rollout.reward_memory, config.rollout.environment_memory) == (8 * 2**30, 8 * 2**30)
    assert (config.learner.checkpointing, config.guard.mismatch_k3) == ("offloaded", 0.02)


def test_what_was_the_default_is_that_of_today() -> None:
    old = given()
    old["memory"] |= {"base": "own", "generator": "auto", "learner": "auto"}
    old["cluster"]["deadlines"] = {"start": 600.0, "group": 900.0, "step": 3600.0, "push": 480.0, "heartbeat": 30.0}
    old["env"] |= {"start_timeout_s": 60.0, "timeout_s": 300.0, "memory": 2**30}
    old["learner"] |= {"offload_boundaries": False}
    old["guard"] = {"mismatch_k3": 0.01, "steps": 5}
    config = recorded(old)
    assert config.memory.layout == "auto"
    assert config.cluster == RunConfig.model_fields["cluster"].default.model_copy(update={"gpus": config.cluster.gpus})
    assert config.env == EnvConfig(use="tools")
    assert config.rollout == RolloutConfig()
    assert config.learner.checkpointing == "full"


def test_what_can_not_be_read_is_refused_in_one_line() -> None:
    with pytest.raises(WrongInput, match=r"^env.memory: not a size"):
        recorded(given() | {"env": {"use": "tools", "memory": "much"}})
    with pytest.raises(WrongInput, match=r"^config: must be a mapping, got list"):
        recorded([])


def test_an_old_run_folder_is_resumed_and_replayed_by_what_it_recorded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(BEFORE.read_text())
    file = tmp_path / "config.yaml"
    file.write_text(BEFORE.read_text().replace("Infinity", ".inf"))
    with pytest.raises(WrongInput, match="learner.loss.band: is an argument"):
        load_config(str(file), ())  # of nobody's run: there are no metrics
    (tmp_path / "metrics.jsonl").touch()
    assert config_of(tmp_path) == replayed(tmp_path, ()) == load_config(str(file), ()) == recorded(given())
    assert replayed(tmp_path, ["learner.loss.bounds={}"]).learner.loss.bounds == {}
    with pytest.raises(WrongInput, match="learner.loss.band: is an argument"):
        replayed(tmp_path, ["learner.loss.band=[0.5, 3]"])
