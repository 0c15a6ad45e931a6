"""What is said of steps from which little or nothing can be learned, by hand."""

from typing import Any

import pytest

from learner.config import RunConfig
from learner.driver.metrics import SignalWatch

GROUPS = 4
QUIET = {"reward/mean": 0.25, "reward/std": 0.5, "rollout/truncated": 0.1, "loss/trained_tokens": 90.0}


def watched(*steps: dict[str, float], **loss: Any) -> tuple[SignalWatch, list[str]]:
    given = {
        "model": {"path": "x"}, "data": {"path": "x"}, "rewards": ["number"], "rollout": {"max_completion_length": 96},
        "learner": {"groups_per_step": GROUPS, "loss": loss},
    }  # fmt: skip
    watch = SignalWatch(RunConfig.model_validate(given))
    return watch, [sentence for step in steps for sentence in watch.add(QUIET | step)]


def alike(*groups: float) -> list[dict[str, float]]:
    return [{"reward/zero_variance_groups": one} for one in groups]


def test_it_is_said_once_while_the_run_goes_on_and_again_at_its_end() -> None:
    watch, said = watched(*alike(*[4] * 12, 3))
    assert len(said) == 1
    assert said[0].startswith(
        "in 40 of the 40 groups of the last 10 steps all completions have the same reward (mean 0.25)"
    )
    (last,) = watch.advice()
    assert last.startswith("in 39 of the 40 groups of the last 10 steps")


def test_a_few_steps_are_enough_at_the_end() -> None:
    watch, said = watched(*alike(4, 4, 4))
    assert said == []
    assert len(watch.advice()) == 1
    assert watched(*alike(4, 4))[0].advice() == []
    same = {"reward/zero_variance_groups": 4.0, "reward/std": 0.0, "reward/mean": 0.0}
    assert watched(same)[0].advice()[0].startswith("in 4 of the 4 groups of the last step all completions have")


@pytest.mark.parametrize("groups", [[4] * 8 + [0, 0], [3] * 20, [0] * 20])
def test_groups_that_differ_are_not_spoken_of(groups: list[float]) -> None:
    watch, said = watched(*alike(*groups))
    assert said == []
    assert watch.advice() == []


def test_ppo_learns_from_one_completion_alone_and_from_nothing_where_all_score_the_same() -> None:
    watch, said = watched(*[{"reward/mean": 0.0}] * 20)
    assert (said, watch.advice()) == ([], [])
    watch, said = watched(*[{"reward/mean": 0.2, "reward/std": 0.0}] * 20)
    assert len(said) == 1
    assert said[0].startswith("in the last 10 steps all completions have the same reward (0.2), so that no answer")


@pytest.mark.parametrize("share", [0.93, 1.0])
def test_completions_that_are_nearly_all_cut_off_are_told_early_and_once(share: float) -> None:
    cut = {"rollout/truncated": share, "reward/zero_variance_groups": 0.0}
    watch, said = watched(*[cut] * 12)
    told = f"in the last 3 steps {share:.0%} of the completions reached rollout.max_completion_length=96 before they"
    assert len(said) == 1
    assert said[0].startswith(told)
    assert "rollout.stop" in said[0]
    assert "mask_truncated" not in said[0]
    assert watch.advice()[0].startswith("in the last 10 steps ")
    assert watched(cut)[0].advice()[0].startswith("in the last step ")
    assert watched(*[cut | {"rollout/truncated": 0.85}] * 20)[1] == []


def test_the_mask_that_leaves_nothing_to_train_on_is_named() -> None:
    nothing = {"loss/trained_tokens": 0.0, "reward/zero_variance_groups": 1.0}
    whole = {"rollout/truncated": 1.0} | nothing
    (told,) = watched(*[whole] * 4, mask_truncated=True)[1]
    assert told.endswith("learner.loss.mask_truncated leaves them out: no token was trained on")
    half = {"rollout/truncated": 0.5} | nothing
    (told,) = watched(*[half] * 4, mask_truncated=True)[1]
    assert told.startswith("in the last 3 steps no token was trained on")
    assert "50% of the completions" in told
    assert watched(*[half] * 4)[1] == []
