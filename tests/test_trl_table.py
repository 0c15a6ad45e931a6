"""docs/trl.md has a place for every argument of TRL's, and what it names here is there."""

import json
import re
from collections import Counter
from dataclasses import fields

import pytest
from peft import LoraConfig

from learner import InputError, train
from learner.config.load import keys, load_config
from tests import trl_places
from tests.trl_arguments import FILE

LISTED = {name: names for name, names in json.loads(FILE.read_text()).items() if name != "versions"}


def rows(begin: str) -> list[tuple[list[str], str]]:
    """The arguments of each row of a section's table, and what is said of them."""
    return trl_places.rows(trl_places.section(begin))


@pytest.mark.parametrize(
    ("section", "listed"),
    [
        ("GRPOTrainer", "GRPOTrainer"),
        ("GRPOConfig", "GRPOConfig"),
        ("What GRPOConfig inherits", "TrainingArguments"),
    ],
)
def test_every_argument_has_its_place_once(section: str, listed: str) -> None:
    told = Counter(name for names, _ in rows(section) for name in names)
    assert set(told) ^ set(LISTED[listed]) == set()
    assert max(told.values()) == 1


def test_every_field_of_pefts_lora_has_its_place_once() -> None:
    told = Counter(name for names, _ in rows(trl_places.PEFT) for name in names)
    assert set(told) ^ {field.name for field in fields(LoraConfig)} == set()
    assert max(told.values()) == 1


def test_no_name_of_other_programs_is_one_that_is_known_already() -> None:
    others = [name for names, _ in rows(trl_places.OTHER_PROGRAMS) for name in names]
    known = {name for names in LISTED.values() for name in names}
    assert [name for name in others if name in known or others.count(name) > 1] == []


def test_settings_that_are_named_are_those_of_the_configuration() -> None:
    known = {key.name for key in keys()}
    groups = {name.rpartition(".")[0] for name in known} | {name.partition(".")[0] for name in known}
    named = {
        (key, value)
        for section in (*trl_places.SECTIONS, trl_places.PEFT, trl_places.OTHER_PROGRAMS)
        for _, told in rows(section)
        for key, value in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: ([^`]+))?`", told)
        if key != "metrics.jsonl" and key != "plan.json"
    }
    assert len(named) > 40
    assert [key for key, _ in named if key not in known | groups] == []
    for key, value in named:
        if value and not re.search(r"[\[<]|my_loss", value) and not key.startswith("env."):
            given = ["model.path=m", "data.path=d", "rewards=[{use: number}]", "model.dtype=bfloat16"]
            if key.startswith("learner.loss"):
                given[-1:] = ["model.dtype=float32", "learner.push=merged"]
            if value == "env:own":
                given.append("env.use=trl_environment")
            load_config(None, [*given, "cluster.gpus={generator: 0.5, learner: 0.5}", f"{key}={value}"])


def test_what_is_not_here_is_refused_with_its_reason() -> None:
    reasons = {
        name: told for name, told in trl_places.places(*trl_places.SECTIONS).items() if told.startswith("not here: ")
    }
    assert len(reasons) > 60
    with pytest.raises(InputError) as caught:
        train("m", ["number"], [{"prompt": "1 + 1"}], **dict.fromkeys(reasons, 1))  # type: ignore[arg-type]
    told = dict(line.split(": unknown key; docs/trl.md says of TRL's: ") for line in str(caught.value).splitlines())
    assert told == reasons


def test_an_argument_of_trl_is_told_its_place() -> None:
    assert {file: file.read_text() for file in trl_places.files()} == trl_places.files(), "python -m tests.trl_places"
    with pytest.raises(InputError) as caught:
        train("m", ["number"], [{"prompt": "1 + 1"}], per_device_train_batch_size=8, learner={"beta": 0.1}, betta=1)
    told = dict(line.split(": unknown key; ") for line in str(caught.value).splitlines())
    assert told["per_device_train_batch_size"].startswith(
        "docs/trl.md says of TRL's: learner.groups_per_step, in problems"
    )
    assert told["learner.beta"] == "docs/trl.md says of TRL's: learner.loss.beta"
    assert told["betta"].startswith("known here: ")
