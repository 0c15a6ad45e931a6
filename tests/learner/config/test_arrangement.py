"""What each arrangement leaves to the planner, and what the driver does for it."""

from typing import Any, get_args

import pytest

from learner.config import RunConfig
from learner.config.arrangement import ARRANGEMENTS
from learner.config.settings import MemoryConfig
from learner.driver.arrangement import HOOKS, Hooks, InTurns, OneBase, hooks_of

HALVES, WHOLE = {"generator": 0.5, "learner": 0.5}, {"generator": 1, "learner": 1}


def run(layout: str, **changed: Any) -> RunConfig:
    given = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": ["number"], "memory": {"layout": layout}}
    return RunConfig.model_validate(given | changed)


def test_each_is_a_choice_of_memory_layout_and_each_that_has_hooks_is_one() -> None:
    assert get_args(MemoryConfig.model_fields["layout"].annotation) == tuple(ARRANGEMENTS)
    assert {name: one.name for name, one in ARRANGEMENTS.items()} == {name: name for name in ARRANGEMENTS}
    assert HOOKS.keys() <= ARRANGEMENTS.keys()
    found = {name: type(hooks_of(one)) for name, one in ARRANGEMENTS.items()}
    assert found == dict.fromkeys(ARRANGEMENTS, Hooks) | {"shared": OneBase, "alternating": InTurns}


@pytest.mark.parametrize(
    ("layout", "changed", "layouts"),
    [
        ("auto", {}, ("slices",)),
        ("auto", {"cluster": {"gpus": HALVES}}, ("slices", "alternating")),
        ("auto", {"cluster": {"gpus": HALVES}, "max_staleness": 1}, ("slices",)),
        ("auto", {"cluster": {"gpus": WHOLE}}, ("separate",)),
        ("separate", {"cluster": {"gpus": WHOLE}}, ("separate",)),
        ("slices", {"cluster": {"gpus": HALVES}}, ("slices",)),
        ("alternating", {"cluster": {"gpus": HALVES}}, ("alternating",)),
        ("shared", {"cluster": {"gpus": HALVES}}, ("slices",)),
        ("sharded", {"cluster": {"learners": 2}}, ("slices",)),
        ("sharded", {"cluster": {"learners": 2, "gpus": WHOLE}}, ("separate",)),
    ],
)
def test_what_the_planner_may_choose_from(layout: str, changed: dict[str, Any], layouts: tuple[str, ...]) -> None:
    config = run(layout, **changed)
    lies = config.arrangement
    assert lies.layouts(config) == layouts
    assert lies.planned(lies.layouts(config)[-1]).name == (layouts[-1] if layout == "auto" else layout)
    assert lies.shards(config) == (2 if layout == "sharded" else 1)
    assert not lies.undoes(config)


def test_ranks_that_hold_the_whole_model_keep_what_a_step_began_with() -> None:
    config = run("auto", cluster={"learners": 2})
    assert config.arrangement.undoes(config)
