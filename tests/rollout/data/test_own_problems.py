"""Problems without a text of their own: an environment says what the model is asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import WrongInput
from rollout.config import DataConfig, EvalConfig
from rollout.data.problems import Problems, load
from rollout.schema import Problem
from tests.rollout.data.test_held_out import Letters


def loaded(eval_: dict[str, Any] | None = None, **config: Any) -> tuple[Problems, list[Problem]]:
    return load(DataConfig(**config, eval=EvalConfig(**eval_ or {})), Letters(), 99, 0)


@pytest.mark.parametrize("size", [1, 30, None])
def test_there_are_as_many_as_are_asked_for_and_others_for_evaluation(size: int | None) -> None:
    problems, held_out = loaded({"size": 5}, path="env:own", size=size)
    assert (len(problems), len(held_out)) == (size or 1000, 5)
    asked = [problems.at(i) for i in range(len(problems))]
    assert all(one.messages == ({"role": "user", "content": ""},) for one in asked)
    numbers = {one.columns["episode"] for one in asked}
    assert numbers == set(range(len(problems)))
    assert not numbers & {one.columns["episode"] for one in held_out}
    assert asked[0].id.startswith("env-")


def test_rows_without_a_prompt_are_told_apart_by_their_columns(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [{"environment": name, "level": i // 2} for i in range(30) for name in ("maze", "chess")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems, held_out = loaded(path=str(file), prompt=None, system="Play.")
    assert [message["role"] for message in problems.at(0).messages] == ["system", "user"]  # type: ignore[index]
    out = {(one.columns["environment"], one.columns["level"]) for one in held_out}
    assert len(out) == 3  # a tenth of the thirty different ones
    assert len(problems) == 60 - 2 * 3
    assert not out & {(problems.at(i).columns["environment"], problems.at(i).columns["level"]) for i in range(54)}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"split": "test"}, "data.split: .* no splits, got 'test'"),
        ({"args": {"a": 1}}, "data.args: env:own takes none"),
    ],
)
def test_it_has_neither_splits_nor_arguments(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WrongInput, match=sentence):
        loaded(path="env:own", **wrong)
