"""docs/trl.md has a place for every argument of TRL's, and what it names here is there."""

import json
import re
from collections import Counter

import pytest

from learner.driver.config_io import keys, load
from tests.test_documents import ROOT
from tests.trl_arguments import FILE

TEXT = (ROOT / "docs" / "trl.md").read_text()
LISTED = {name: names for name, names in json.loads(FILE.read_text()).items() if name != "versions"}
ROW = re.compile(r"^\| (`.*?) \| (.*) \|$", re.MULTILINE)


def rows(section: str) -> list[tuple[list[str], str]]:
    """The arguments of each row of a section's table, and what is said of them."""
    (text,) = [part for part in TEXT.split("\n## ") if part.startswith(section)]
    return [(re.findall(r"`(\w+)`", names), told) for names, told in ROW.findall(text)]


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
            load(None, [*given, "cluster.gpus={generator: 0.5, learner: 0.5}", f"{key}={value}"])
