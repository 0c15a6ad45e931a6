"""What each arrangement leaves to the planner, and what the driver does for it."""

from typing import Any, get_args

import pytest

from learner.config import RunConfig
from learner.config.arrangement import ARRANGEMENTS, with_cards
from learner.config.load import validated
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


@pytest.mark.parametrize(
    ("cards", "settings", "gpus"),
    [
        (0, {}, None),
        (1, {}, (0.5, 0.5)),
        (2, {}, (1, 1)),
        (2, {"memory": {"layout": "shared"}}, (0.5, 0.5)),
        (2, {"memory": {"layout": "alternating"}}, (0.5, 0.5)),
        (1, {"memory": {"layout": "separate"}}, None),  # too few, so that it stays as it was
        (2, {"memory": {"layout": "separate"}}, (1, 1)),
        (1, {"rollout": {"workers": 2}}, (0.33, 0.33)),
        (2, {"rollout": {"workers": 2}}, (0.33, 0.33)),
        (3, {"rollout": {"workers": 2}}, (1, 1)),
        (4, {"cluster": {"tensor_parallel": 2}}, (2, 1)),
        (2, {"cluster": {"tensor_parallel": 2}}, None),
        (4, {"cluster": {"learners": 2}}, (1, 1)),
        (2, {"cluster": {"learners": 2}}, None),
        (2, {"cluster": {"rewards": {"processes": 1, "gpus": 1}}}, (0.5, 0.5)),
        (1, {"cluster": {"rewards": {"processes": 1, "gpus": 1}}}, None),
        (1, {"rollout": {"workers": 120}}, None),
        (1, {"model": {"path": "m", "dtype": "float32"}}, None),
        (2, {"cluster": {"address": "auto"}}, (1, 1)),
        (2, {"cluster": {"gpus": {"generator": 0.5, "learner": 0.5}}}, (0.5, 0.5)),
        (2, {"cluster": {"gpus": {"generator": 1}}}, (1, 0)),
        (2, {"cluster": {"gpus": {}}}, (0, 0)),
        (2, {"cluster": None}, None),
        (2, {"cluster": "two cards"}, None),
    ],
)  # fmt: skip
def test_settings_that_name_no_card_take_those_that_are_here(
    cards: int, settings: dict[str, Any], gpus: tuple[float, float] | None
) -> None:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": ["number"], **settings}
    if gpus is None:
        assert with_cards(tree, lambda: cards) == tree
        return
    config = validated(tree, cards)
    assert (config.cluster.gpus.generator, config.cluster.gpus.learner) == gpus
    assert with_cards(tree, lambda: 0) == tree


@pytest.mark.parametrize(
    ("cards", "settings", "gpus"),
    [
        (1, {}, (0.33, 0.33, 0.33)),
        (2, {}, (0.5, 0.5, 1)),
        (3, {}, (1, 1, 1)),
        (1, {"memory": {"layout": "separate"}}, None),
        (3, {"cluster": {"gpus": {"generator": 1, "learner": 1}}}, (1, 1, 0)),
    ],
)
def test_a_teacher_has_a_card_of_its_own_where_there_are_two(
    cards: int, settings: dict[str, Any], gpus: tuple[float, float, float] | None
) -> None:
    tree: dict[str, Any] = {
        "model": {"path": "m", "teacher": "t"}, "data": {"path": "d"}, "rewards": ["number"],
        "learner": {"loss": {"beta": 1}}, **settings,
    }  # fmt: skip
    if gpus is None:
        assert with_cards(tree, lambda: cards) == tree
        return
    found = validated(tree, cards).cluster.gpus
    assert (found.generator, found.learner, found.teacher) == gpus


def test_cards_are_not_asked_for_where_nothing_depends_on_them() -> None:
    def never() -> int:
        raise AssertionError

    tree = {"cluster": {"gpus": {"generator": 0, "learner": 0}}}
    assert with_cards(tree, never) == tree
