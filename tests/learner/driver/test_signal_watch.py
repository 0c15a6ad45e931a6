"""What is said of groups whose completions all score alike, by hand."""

import pytest

from learner.driver.signal_watch import SignalWatch


def watched(*alike: float) -> tuple[SignalWatch, list[str]]:
    watch = SignalWatch(groups_per_step=4)
    said = [watch.add({"reward/zero_variance_groups": one, "reward/mean": 0.25}) for one in alike]
    return watch, [sentence for sentence in said if sentence is not None]


def test_it_is_said_once_while_the_run_goes_on_and_again_at_its_end() -> None:
    watch, said = watched(*[4] * 12, 3)
    assert len(said) == 1
    assert said[0].startswith(
        "in 40 of the 40 groups of the last 10 steps all completions have the same reward (mean 0.25)"
    )
    last = watch.advice()
    assert last is not None
    assert last.startswith("in 39 of the 40 groups of the last 10 steps")


def test_a_few_steps_are_enough_at_the_end() -> None:
    watch, said = watched(4, 4, 4)
    assert said == []
    assert watch.advice() is not None
    assert watched(4, 4)[0].advice() is None


@pytest.mark.parametrize("alike", [[4] * 8 + [0, 0], [3] * 20, [0] * 20])
def test_groups_that_differ_are_not_spoken_of(alike: list[float]) -> None:
    watch, said = watched(*alike)
    assert said == []
    assert watch.advice() is None


def test_ppo_learns_from_one_completion_alone() -> None:
    watch = SignalWatch(groups_per_step=4)
    assert all(watch.add({"reward/mean": 0.0}) is None for _ in range(20))
    assert watch.advice() is None
