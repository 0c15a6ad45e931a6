"""What is said of a reward and a watch, by hand: windows of ten steps, noise that is known, and no noise at all."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from rewards.config import RewardConfig
from rewards.watch import FALLS, STALLS, Pair, Series, columns_of, findings, sentence

Floats = npt.NDArray[np.float64]
STEPS = 60
RISING, FALLING = np.linspace(0.2, 0.8, STEPS), np.linspace(0.6, 0.2, STEPS)
FLAT = np.full(STEPS, 0.4)


def noisy(values: Floats, seed: int, deviation: float = 0.03) -> Floats:
    return np.asarray(values + np.random.default_rng(seed).normal(0, deviation, len(values)))


def series(reward: Floats, watch: Floats, main: Floats | None = None) -> Series:
    return Series(
        np.arange(1, len(reward) + 1), reward, np.full(len(reward), 0.5), reward if main is None else main,
        {"strict": watch},
    )  # fmt: skip


def checks(reward: Floats, watch: Floats, main: Floats | None = None) -> list[str]:
    return [found.check for found in findings(series(reward, watch, main))]


@pytest.mark.parametrize("seed", range(8))
def test_what_each_check_says(seed: int) -> None:
    reward = noisy(RISING, seed)
    assert checks(reward, noisy(FALLING, seed + 100)) == [FALLS]
    assert checks(reward, noisy(FLAT, seed + 100)) == [STALLS]
    assert checks(reward, noisy(RISING - 0.1, seed + 100)) == []
    assert checks(reward, noisy((RISING - 0.2) / 2 + 0.3, seed + 100)) == []  # half as far is far enough
    assert checks(noisy(FLAT, seed), noisy(FALLING, seed + 100)) == []  # the reward does not rise
    assert checks(noisy(FALLING, seed), noisy(FLAT, seed + 100)) == []
    assert checks(noisy(FLAT, seed, 0.3), noisy(FALLING, seed + 100)) == []  # it may rise, and may not


def test_a_watch_that_may_follow_is_not_spoken_of() -> None:
    """Its two windows are equal, and their noise has room for what the reward's rise would lead to."""
    swing = np.where(np.arange(STEPS) % 2, 0.1, -0.1)
    assert checks(RISING + swing, FLAT + swing) == []
    assert checks(RISING + swing / 5, FLAT + swing / 5) == [STALLS]


def test_a_watch_that_rose_with_the_reward_and_fell_later_is_found_by_its_best_steps() -> None:
    peak = np.concatenate([np.linspace(0.2, 0.6, 30), np.linspace(0.6, 0.2, 30)])
    (found,) = findings(series(noisy(RISING, 0), noisy(peak, 1)))
    assert found.check == FALLS
    assert 7 <= found.early[0] <= 31  # not the first window, where the watch stood where it stands now
    assert found.early[1] - found.early[0] == found.late[1] - found.late[0] == STEPS // 5 - 1
    assert found.late == (49, 60)


def test_where_a_form_is_learned_first_the_watch_follows_the_main_part() -> None:
    """The sum rises by the form alone while part and watch wait: an honest run. A watch that falls is told anyway."""
    reward, main = noisy(RISING, 0), noisy(FLAT, 1)
    assert checks(reward, noisy(FLAT, 2), main) == []
    assert checks(reward, noisy(FALLING, 2), main) == [FALLS]
    assert checks(reward, noisy(FLAT, 2), reward) == [STALLS]


def test_a_watch_that_hardly_ever_passes_does_not_stand_still() -> None:
    reward = noisy(RISING, 0)
    rare = np.random.default_rng(1).binomial(32, 0.01, STEPS) / 32
    assert checks(reward, rare) == []
    assert checks(reward, np.zeros(STEPS)) == []
    assert checks(reward, np.full(STEPS, 0.4)) == [STALLS]  # without any noise


@pytest.mark.parametrize("count", [0, 1, 19])
def test_fewer_steps_than_two_windows_say_nothing(count: int) -> None:
    assert checks(np.linspace(0, 1, STEPS)[:count], np.linspace(1, 0, STEPS)[:count]) == []


def test_small_rises_say_nothing_however_sure_they_are() -> None:
    """An eighth of the deviation within a step, with hardly any noise."""
    little = np.linspace(0.5, 0.5 + 0.5 / 8, STEPS)
    assert checks(noisy(little, 0, 1e-4), noisy(FALLING, 1, 1e-4)) == []
    assert checks(noisy(little * 4, 0, 1e-4), noisy(FALLING, 1, 1e-4)) == [FALLS]


def test_steps_without_a_value_are_left_out() -> None:
    reward, watch = noisy(RISING, 0), noisy(FALLING, 1)
    holes = watch.copy()
    holes[::3] = np.nan
    (found,) = findings(series(reward, holes))
    assert np.isfinite([*found.reward, *found.watch]).all()
    kept = np.flatnonzero(np.isfinite(holes))
    assert found.late == (int(kept[-10]) + 1, int(kept[-1]) + 1)
    assert checks(reward, np.full(STEPS, np.nan)) == []


def test_noise_is_that_of_neighbouring_steps_and_not_the_trend() -> None:
    steps = np.arange(200)
    pair = Pair.of(steps, noisy(np.linspace(0, 1, 200), 0, 0.1), noisy(np.zeros(200), 1, 0.02), np.ones(200))
    assert pair.noise[:, 0] == pytest.approx([0.1, 0.02], rel=0.15)
    assert pair.error[:, 0] == pytest.approx(pair.noise[:, 0] * (2 / 40) ** 0.5)


def rewards(*given: dict[str, object]) -> list[RewardConfig]:
    return [RewardConfig.model_validate(one) for one in given]


def test_the_series_of_a_run_are_read_from_its_metrics() -> None:
    some = rewards(
        {"use": "format", "weight": 0.5}, {"use": "number", "weight": 2.0},
        {"use": "math", "watch": True, "name": "strict"},
    )  # fmt: skip
    columns: dict[str, Sequence[float | None]] = {
        "reward/mean": [1.0, 2.0], "reward/std": [0.5, None], "reward/number": [0.25, 0.5],
        "reward/strict": [None, 0.125],
    }  # fmt: skip
    found = Series.of(some, [3, 4], columns)
    assert found.steps.tolist() == [3, 4]
    assert found.main.tolist() == [0.5, 1.0]
    assert found.watches["strict"].tolist() == pytest.approx([np.nan, 0.125], nan_ok=True)
    assert found.deviation.tolist() == pytest.approx([0.5, np.nan], nan_ok=True)
    assert {*columns} <= {*columns_of(some)}
    assert Series.of(some[1:], [3, 4], columns).main.tolist() == [1.0, 2.0]  # one part is the whole reward
    assert Series.of(some[2:], [3, 4], columns).main.tolist() == [1.0, 2.0]  # and so is an environment's


def test_the_sentence_names_steps_and_means() -> None:
    (found,) = findings(series(RISING, FALLING))
    assert sentence(found).startswith(
        "from steps 1-12 to steps 49-60 the reward has risen from 0.256 to 0.744, and the watch 'strict' has fallen "
        "(from 0.563 to 0.237): "
    )
    assert "has not followed" in sentence(found._replace(check=STALLS))
