"""docs/trl.md has a place for every argument of TRL's, and what it names here is there."""

import json
import re
from collections import Counter

import pytest

from learner import InputError, train
from learner.driver.config_io import keys, load
from tests import trl_places
from tests.trl_arguments import FILE

TEXT = trl_places.PAGE.read_text()
LISTED = {name: names for name, names in json.loads(FILE.read_text()).items() if name != "versions"}


def rows(section: str) -> list[tuple[list[str], str]]:
    """The arguments of each row of a section's table, and what is said of them."""
    (text,) = [part for part in TEXT.split("\n## ") if part.startswith(section)]
    return trl_places.rows(text)


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


def test_settings_that_are_named_are_those_of_the_configuration() -> None:
    known = {key.name for key in keys()}
    groups = {name.rpartition(".")[0] for name in known} | {name.partition(".")[0] for name in known}
    named = {
        (key, value)
        for section in ("GRPOTrainer", "GRPOConfig", "What GRPOConfig inherits")
        for _, told in rows(section)
        for key, value in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: ([^`]+))?`", told)
        if key != "metrics.jsonl" and key != "plan.json"
    }
    assert len(named) > 40
    assert [key for key, _ in named if key not in known | groups] == []
    for key, value in named:
        if value and not re.search(r"[\[<]|my_loss", value) and not key.startswith("env."):
            dtype = "float32" if key.startswith("learner.loss") else "bfloat16"
            given = ["model.path=m", "data.path=d", "rewards=[{use: number}]", f"model.dtype={dtype}"]
            if value == "env:own":
                given.append("env.use=trl_environment")
            load(None, [*given, "cluster.gpus={generator: 0.5, learner: 0.5}", f"{key}={value}"])


def test_what_is_not_here_is_refused_with_its_reason() -> None:
    reasons = {name: told for name, told in trl_places.places().items() if told.startswith("not here: ")}
    assert len(reasons) > 60
    with pytest.raises(InputError) as caught:
        train("m", ["number"], [{"prompt": "1 + 1"}], **dict.fromkeys(reasons, 1))  # type: ignore[arg-type]
    told = dict(line.split(": unknown key; docs/trl.md says of TRL's: ") for line in str(caught.value).splitlines())
    assert told == reasons


def test_an_argument_of_trl_is_told_its_place() -> None:
    assert json.loads(trl_places.FILE.read_text()) == trl_places.places(), "run python -m tests.trl_places"
    with pytest.raises(InputError) as caught:
        train("m", ["number"], [{"prompt": "1 + 1"}], per_device_train_batch_size=8, learner={"beta": 0.1}, betta=1)
    told = dict(line.split(": unknown key; ") for line in str(caught.value).splitlines())
    assert told["per_device_train_batch_size"].startswith(
        "docs/trl.md says of TRL's: learner.groups_per_step, in problems"
    )
    assert told["learner.beta"] == "docs/trl.md says of TRL's: learner.loss.beta"
    assert told["betta"].startswith("known here: ")
