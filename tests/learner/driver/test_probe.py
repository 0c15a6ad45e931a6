"""Probe tokens: of a prompt until something was trained on, then of a batch, for as long as they have more to say."""

from __future__ import annotations

import numpy as np

from learner.driver.loop import LIFE, TOKENS, Probe
from rollout.fakes import make_group
from rollout.types import Completion


def completion(*tokens: int) -> Completion:
    return Completion(
        np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop", np.zeros(len(tokens), np.int32)
    )


def test_the_end_of_a_prompt_and_the_beginning_of_what_was_rewarded_most_differently() -> None:
    probe = Probe([5, 6, 7], longest=1000)
    assert list(probe.ids) == [5, 6, 7] * 21 + [5]
    dull = make_group(0, rewards=(1.0, 1.0))
    told = [completion(1), completion(*range(100)), completion(2)]
    group = make_group(1, completions=told, rewards=(0.0, 1.0, None), prompt_ids=[list(range(200, 300))] * 3)
    probe.trained_on([dull], settled=True)
    assert probe.ids[0] == 5
    probe.trained_on([dull, group], settled=False)
    assert len(probe.ids) == TOKENS
    # 0 and 1 are as far from their mean: the first of them, one token, after the end of the prompt.
    assert probe.ids == (*range(237, 300), 1)
    short = make_group(2, completions=told[1:], rewards=(0.0, 1.0), prompt_ids=[[8]] * 2)
    for _ in range(LIFE - 1):
        probe.trained_on([short], settled=True)
        assert probe.ids[-1] == 1
    probe.trained_on([short], settled=False)
    assert probe.ids[-1] == 1  # on these a frozen generator would not have shown yet
    probe.trained_on([dull], settled=True)
    assert probe.ids[-1] == 1
    probe.trained_on([short], settled=True)
    assert probe.ids == (8, *range(48), 8, *range(14))
    for _ in range(LIFE - 1):
        probe.trained_on([group], settled=True)
        assert probe.ids[0] == 8
    odd = make_group(3, completions=told, rewards=(1.0, 1.0, 0.0), prompt_ids=[[9]] * 3)
    probe.trained_on([odd], settled=True)
    assert probe.ids == (9, 2) * 32  # their life is over


def test_a_completion_alone_is_learned_from_if_it_has_a_reward() -> None:
    probe = Probe([5, 6, 7], longest=4)
    probe.trained_on([make_group(0, completions=[completion(1)], rewards=(None,))], settled=True)
    assert probe.ids == (5, 6, 7, 5)
    probe.trained_on([make_group(1, completions=[completion(1)], rewards=(0.0,), prompt_ids=[[8]])], settled=True)
    assert probe.ids == (8, 1, 8, 1)


def test_it_is_no_longer_than_what_an_engine_takes() -> None:
    probe = Probe([5, 6, 7], longest=10)
    assert probe.ids == (5, 6, 7) * 3 + (5,)
    probe.trained_on([make_group(0, rewards=(1.0, 0.0))], settled=False)
    assert probe.ids == (3, 1, 2, 0) * 2 + (3, 1)
